import pytest
import torch

from tests.tiny import write_tiny_model
from tests.unit.test_gptq import correlated_hessian
from yardstick.corpora.load import write_arrays
from yardstick.errors import YardstickError
from yardstick.evaluate.candidate import open_candidate
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states
from yardstick.quantize.checkpoint import INDEX, PackedWriter
from yardstick.quantize.drift import Drift
from yardstick.quantize.gptq import gptq, output_error
from yardstick.quantize.grid import Grid, find_range, nearest_codes, static_ranges
from yardstick.quantize.hessian import inverse_factor
from yardstick.quantize.pack import dequantize
from yardstick.quantize.refine import Rows, damped, price, refine, search_ranges
from yardstick.quantize.run_refined import quantize_model


def factor_of(hessian):
    return inverse_factor(hessian, 0.0, "w")[0]


def exact_bf16(tensor):
    return torch.equal(tensor, tensor.bfloat16().float())


def start(rows=12, features=150, group_size=64, seed=0):
    """Weights, a Hessian and what plain GPTQ makes of them; the last group is short."""
    torch.manual_seed(seed)
    weights, hessian = torch.randn(rows, features), damped(correlated_hessian(features), 0.01)
    result = gptq(weights, hessian, Grid(group_size), True, 0.0, "w")
    return weights, hessian, result.codes, result.scales.float(), result.minima.float()


def brute_error(row, codes, scale, minimum, hessian):
    difference = (row - (codes * scale + minimum)).double()
    return float(difference @ hessian.double() @ difference)


def test_price_is_the_reciprocal_of_the_inverse_diagonal():
    hessian = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 5.0]])
    # the inverse of [[2, 1], [1, 2]] is [[2, -1], [-1, 2]] / 3
    torch.testing.assert_close(price(factor_of(hessian)), torch.tensor([1.5, 1.5, 5.0]))


def test_damping_leaves_dead_columns_out_of_the_mean():
    found = damped(torch.diag(torch.tensor([1.0, 0.0, 3.0])), 0.1)
    torch.testing.assert_close(found, torch.diag(torch.tensor([1.2, 1.2, 3.2])))


def test_given_ranges_are_used_as_they_are_in_either_order():
    weights, hessian, *_ = start()
    ranges = static_ranges(weights, Grid(64, mse=True))
    for act_order in (False, True):
        result = gptq(weights, hessian, Grid(64), act_order, 0.01, "w", ranges)
        assert torch.equal(result.scales.float(), ranges[0]) and torch.equal(result.minima.float(), ranges[1])
    assert torch.equal(result.codes, gptq(weights, hessian, Grid(64, mse=True), True, 0.01, "w").codes)


def weighted_error(weights, scales, minima, importance):
    codes = nearest_codes(weights, scales[:, None], minima[:, None])
    return (codes * scales[:, None] + minima[:, None] - weights).square() @ importance


def test_range_search_is_never_worse_than_the_whole_range_and_mostly_better_than_the_unweighted_search():
    weights, importance = torch.randn(200, 64), torch.rand(64).pow(4) + 1e-3
    scales, minima = (values[:, 0] for values in search_ranges(weights, importance, 64))
    assert exact_bf16(scales) and exact_bf16(minima)
    ours = weighted_error(weights, scales, minima, importance)
    assert bool((ours <= weighted_error(weights, *find_range(weights), importance) * (1 + 1e-5)).all())
    theirs = weighted_error(weights, *find_range(weights, mse=True), importance)
    assert float((ours < theirs).float().mean()) > 0.9 and float(ours.sum()) < 0.75 * float(theirs.sum())


def test_range_search_gives_up_the_columns_that_do_not_matter():
    """Fifteen even steps and an outlier: where the outlier has no weight the steps are hit, else it widens them."""
    weights = torch.cat((torch.arange(16) / 16 - 0.5, torch.tensor([0.8])))[None]
    importance = torch.ones(17)
    wide = search_ranges(weights, importance * 1.0, 17)[0]
    importance[-1] = 0.0
    scales, minima = search_ranges(weights, importance, 17)
    assert float(scales) == pytest.approx(1 / 16, rel=0.01) and float(minima) == pytest.approx(-0.5, abs=0.01)
    assert float(wide) > 1.1 / 16


def test_range_search_takes_every_group_and_row_for_itself():
    weights, importance = torch.randn(1100, 20) * torch.logspace(-2, 2, 20), torch.rand(20) + 0.1
    scales, minima = search_ranges(weights, importance, 8)
    assert scales.shape == minima.shape == (1100, 3)
    for row, group in ((0, 0), (1099, 1), (1030, 2)):
        columns = slice(8 * group, 8 * group + 8)
        alone = search_ranges(weights[row : row + 1, columns], importance[columns], 8)
        assert (float(alone[0]), float(alone[1])) == (float(scales[row, group]), float(minima[row, group]))


def test_constant_group_stays_a_constant():
    scales, minima = search_ranges(torch.full((2, 8), 0.75), torch.ones(8), 8)
    assert scales.tolist() == [[0.0], [0.0]] and minima.tolist() == [[0.75], [0.75]]


def test_refitted_ranges_are_the_least_squares_of_the_output():
    """Against lstsq on L^T (w - B x) with H = L L^T, a row at a time in fp64."""
    weights, hessian, codes, scales, minima = start()
    found = Rows(weights, codes, scales, minima, hessian, 64).refitted_ranges()
    assert exact_bf16(found[0]) and exact_bf16(found[1])
    root = torch.linalg.cholesky(hessian.double()).T
    for row in range(len(weights)):
        basis = torch.zeros(150, 6, dtype=torch.float64)
        for column in range(150):
            basis[column, column // 64] = codes[row, column]
            basis[column, 3 + column // 64] = 1
        best = torch.linalg.lstsq(root @ basis, root @ weights[row].double()).solution

        def error(x, basis=basis, row=row):
            return float((root @ (weights[row].double() - basis @ x)).square().sum())

        ours = error(torch.cat((found[0][row], found[1][row])).double())
        before = error(torch.cat((scales[row], minima[row])).double())
        assert error(best) <= ours < before
        # rounding with the error spread on must not cost more than rounding each by itself
        assert ours <= max(error(best.bfloat16().double()), error(best) * 1.02)


def test_refit_leaves_a_row_alone_whose_codes_are_all_the_same():
    weights, hessian = torch.randn(2, 16), damped(correlated_hessian(16), 0.01)
    codes = torch.stack((torch.zeros(16, dtype=torch.uint8), torch.arange(16, dtype=torch.uint8)))
    scales, minima = torch.tensor([[0.5], [0.25]]), torch.tensor([[1.0], [-2.0]])
    found = Rows(weights, codes, scales, minima, hessian, 16).refitted_ranges()
    assert float(found[0][0]) == 0.5 and bool(found[1].isfinite().all())
    expected = (hessian.double() @ weights[0].double()).sum() / hessian.double().sum()
    assert float(found[1][0]) == pytest.approx(float(expected), rel=2**-8)


def test_descent_ends_where_no_single_code_can_be_changed_for_the_better():
    weights, hessian, codes, scales, minima = start(rows=6, features=40, group_size=16)
    codes = torch.randint(0, 16, codes.shape, dtype=torch.uint8)  # a bad start
    for _ in range(60):
        before = codes
        codes = Rows(weights, codes, scales, minima, hessian, 16).descended_codes()
    assert torch.equal(codes, before)
    groups = torch.arange(40) // 16
    for row in range(6):
        scale, minimum = scales[row, groups], minima[row, groups]
        settled = brute_error(weights[row], codes[row].float(), scale, minimum, hessian)
        for column in range(40):
            for code in range(16):
                other = codes[row].float().clone()
                other[column] = code
                assert brute_error(weights[row], other, scale, minimum, hessian) > settled * (1 - 1e-5) - 1e-9


def test_one_sweep_is_a_walk_of_single_best_codes():
    """130 columns cross the block of 128. Oracle: for each column try all 16 codes by the whole error, fp64."""
    weights, hessian, codes, scales, minima = start(rows=3, features=130, group_size=48)
    ours = Rows(weights, codes, scales, minima, hessian, 48).descended_codes()
    groups = torch.arange(130) // 48
    for row in range(3):
        current, scale, minimum = codes[row].float().clone(), scales[row, groups], minima[row, groups]
        for column in range(130):
            trials = current.repeat(16, 1)
            trials[:, column] = torch.arange(16.0)
            difference = (weights[row] - (trials * scale + minimum)).double()
            current = trials[((difference @ hessian.double()) * difference).sum(-1).argmin()]
        assert float((current == ours[row].float()).float().mean()) > 0.98


@pytest.mark.parametrize("seed", range(3))
def test_refinement_lowers_the_error_of_every_row_or_leaves_it(seed):
    weights, hessian, codes, scales, minima = start(seed=seed)
    errors = [
        [
            output_error(row[None], dequantize(c[None], s[None], m[None], 64), hessian)
            for row, c, s, m in zip(weights, *state, strict=True)
        ]
        for state in (
            (codes, scales, minima),
            *(refine(weights, codes, scales, minima, hessian, 64, n) for n in (1, 4)),
        )
    ]
    for before, once, often in zip(*errors, strict=True):
        assert often <= once * (1 + 1e-6) <= before * (1 + 2e-6)
    assert sum(errors[2]) < 0.97 * sum(errors[0])


def test_no_rounds_change_nothing():
    weights, hessian, codes, scales, minima = start()
    same = refine(weights, codes, scales, minima, hessian, 64, 0)
    assert torch.equal(same[0], codes) and torch.equal(same[1].float(), scales) and torch.equal(same[2].float(), minima)


def streams(tokens=200, features=12):
    """Original and quantized inputs of four batches, and what is missing in the residual stream of width 5."""
    torch.manual_seed(1)
    after = torch.randn(4, tokens, features)
    original = after @ (torch.eye(features) + 0.2 * torch.randn(features, features)) + 3 * torch.randn_like(after)
    return original, after, 3 * torch.randn(4, tokens, 5) + 0.3 * after[..., :5]


@pytest.mark.parametrize("with_residual", [False, True])
def test_target_is_a_ridge_regression_with_the_strength_of_two_fold_cross_validation(with_residual):
    """In fp64 from the tokens themselves; a ridge is that many more tokens, whose output is 0."""
    (original, after, gap), weights = streams(tokens=15), torch.randn(5, 12)
    drift = Drift(12)
    for batch in range(4):
        drift.add(after[batch], original[batch], gap[batch] if with_residual else None)
    missing = (original - after).double() @ weights.double().T + (gap.double() if with_residual else 0)

    def regression(batches):
        x, m = after[batches].flatten(0, 1).double(), missing[batches].flatten(0, 1)
        ridge = x.square().sum(0).mean().sqrt() * torch.eye(12, dtype=torch.float64)
        return torch.linalg.lstsq(torch.cat((x, ridge)), torch.cat((m, torch.zeros(12, 5).double()))).solution.T

    def left(strength):
        """Squared error of what each half has learned, in the other."""
        return sum(
            float((missing[there] - strength * after[there].double() @ regression(here).T).square().sum())
            for here, there in (([0, 2], [1, 3]), ([1, 3], [0, 2]))
        )

    target, strength = drift.target(weights, "w")
    single = strength / (2 - strength)
    assert 0.1 < single < 1 and left(single) < min(left(single - 0.01), left(min(single + 0.01, 1)))
    expected = weights.double() + strength * regression([0, 1, 2, 3])
    torch.testing.assert_close(target.double(), expected, rtol=1e-4, atol=1e-5)
    flat = after.flatten(0, 1)
    torch.testing.assert_close(drift.hessian("w"), flat.T @ flat / len(flat))


def test_nothing_is_corrected_where_nothing_is_missing_or_halves_disagree():
    original, after, _ = streams()
    weights, same, opposed = torch.randn(5, 12), Drift(12), Drift(12)
    for batch in range(4):
        same.add(after[batch], after[batch])
        opposed.add(after[batch], after[batch] + (-1) ** batch * original[batch])
    for drift in (same, opposed):
        target, strength = drift.target(weights, "w")
        assert strength == 0 and torch.equal(target, weights)


LENGTH = 24


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def tiny(request, tmp_path_factory):
    """A tiny model and calibration sequences for it."""
    folder = tmp_path_factory.mktemp(request.param)
    layers = {"layers": 2, "layer_types": ["linear_attention", "full_attention"]} if request.param == "qwen3_5" else {}
    original = open_folder(write_tiny_model(folder / "model", request.param, tied=True, **layers))
    ids = torch.randint(0, 512, (12, LENGTH), generator=torch.Generator().manual_seed(4))
    write_arrays(folder / "calib.npz", {"text": ids.numpy()})
    return original, folder / "calib.npz", ids


def run(tiny, folder, **changes):
    """Quantize into `folder`; the packed checkpoint."""
    original, calibration, _ = tiny
    recipe = {
        "group_size": 32,
        "damping": 0.01,
        "rounds": 2,
        "drift": 1.0,
        "residual": 1.0,
        "keep_bf16": None,
    } | changes
    writer = PackedWriter(folder, "digest")
    with torch.no_grad():
        shards = quantize_model(original.source, original.config, recipe, writer, calibration)
    reports = writer.finish(shards, recipe, original.folder)
    return open_candidate("packed", folder / INDEX, original), reports


def state_error(tiny, source):
    """Relative error of the final states on the calibration sequences."""
    original, _, ids = tiny
    ours, theirs = (final_hidden_states(s, original.config, ids, torch.float32, 4) for s in (source, original.source))
    return float((ours - theirs).norm() / theirs.norm())


def test_each_part_brings_the_states_of_a_model_nearer_to_the_originals(tiny, tmp_path):
    plain, reports = run(tiny, tmp_path / "plain", rounds=0, drift=False)
    refined, _ = run(tiny, tmp_path / "refined", drift=False)
    drifted, corrected = run(tiny, tmp_path / "drifted")
    errors = [state_error(tiny, source) for source in (plain, refined, drifted)]
    assert errors == sorted(errors, reverse=True) and errors[2] < 0.95 * errors[0]
    for report in (*reports, *corrected):
        assert report["output_error"] < report["output_error_rtn"]
    assert {report["name"] for report in reports} == {*tiny[0].config.body_matrices(), "lm_head.weight"}
    assert {report["drift_strength"] for report in reports} == {0.0}
    assert max(report["drift_strength"] for report in corrected) > 0.1


def test_a_stopped_run_goes_on_and_ends_in_the_same_bytes(tiny, tmp_path):
    run(tiny, tmp_path)
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    layers = tiny[0].config.num_layers
    for name in ("rest", f"layer-{layers - 1:05d}"):
        (tmp_path / f"{name}.safetensors").unlink()
    run(tiny, tmp_path)
    assert len(whole) == layers + 1
    assert whole == {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}


def test_matrices_that_the_recipe_keeps_are_the_originals(tiny, tmp_path):
    source, reports = run(tiny, tmp_path, keep_bf16="down_proj|lm_head")
    original, kept = tiny[0], [name for name in tiny[0].config.body_matrices() if "down_proj" in name]
    assert kept and not {*kept, "lm_head.weight"} & {report["name"] for report in reports}
    for name in kept:
        assert torch.equal(source.get(name), original.source.get(name))


def test_too_few_sequences_to_be_halved_are_refused(tiny, tmp_path):
    original, _, ids = tiny
    write_arrays(tmp_path / "few.npz", {"text": ids[:4].numpy()})
    with pytest.raises(YardstickError, match="few.npz: 4 calibration sequences; gptq-refined needs more than 4"):
        run((original, tmp_path / "few.npz", ids), tmp_path / "out")
