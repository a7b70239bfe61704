import json

import numpy as np
import pytest
import torch

from tests.tiny import write_tiny_model
from yardstick.models.folder import open_folder
from yardstick.quantize import distill, run_distill, run_rtn
from yardstick.quantize.checkpoint import INDEX, PackedWriter
from yardstick.quantize.distill import Adam, Matrix, group_sums, kl_divergence, rate_share
from yardstick.quantize.run_distill import batch_rows
from yardstick.sources.packed import PackedSource

RECIPE = {
    "method": "distill",
    "start": "rtn",
    "steps": 6,
    "batch_tokens": 256,
    "rate": 0.01,
    "held_out": 0.2,
    "score_every": 2,
    "seed": 0,
}


@pytest.fixture(autouse=True)
def as_a_step_runs():
    """No gradients unless they are asked for, as `exact_arithmetic` leaves it."""
    with torch.no_grad():
        yield


def random_matrix(out=12, columns=40, group_size=16):
    groups = -(-columns // group_size)
    codes = torch.randint(0, 16, (out, columns), dtype=torch.uint8)
    scales, minima = torch.rand(out, groups) + 0.5, -3 * torch.rand(out, groups)
    return Matrix(codes, scales, minima, torch.zeros_like(scales), torch.zeros_like(minima), group_size)


def test_gradients_of_groups_are_those_of_a_dense_graph():
    """The last group is short: 16, 16 and 8 columns."""
    matrix = random_matrix()
    matrix.scales.copy_(matrix.scales.bfloat16())
    matrix.minima.copy_(matrix.minima.bfloat16())
    inputs, wanted = torch.randn(2, 5, 40), torch.randn(2, 5, 12)
    x, scales, minima = (t.double().requires_grad_() for t in (inputs, matrix.scales, matrix.minima))
    ours = inputs.clone().requires_grad_()
    group = torch.arange(40) // 16
    with torch.enable_grad():
        weights = matrix.codes.double() * scales[:, group] + minima[:, group]
        (x @ weights.T - wanted.double()).pow(2).mean().backward()
        (matrix(ours) - wanted).pow(2).mean().backward()
    torch.testing.assert_close(ours.grad, x.grad.float())
    torch.testing.assert_close(matrix.scale_gradients, scales.grad.float())
    torch.testing.assert_close(matrix.minimum_gradients, minima.grad.float())


def test_the_forward_uses_the_values_that_are_stored():
    matrix = random_matrix()
    group = torch.arange(40) // 16
    stored = matrix.codes.float() * matrix.scales.bfloat16().float()[:, group] + matrix.minima.bfloat16()[:, group]
    assert torch.equal(matrix.dense(), stored)
    assert not torch.equal(matrix.scales, matrix.scales.bfloat16().float())


def test_sums_of_groups_by_hand():
    values = torch.tensor([[1.0, 2, 3, 4, 5], [10, 20, 30, 40, 50]])
    assert group_sums(values, 2).tolist() == [[3, 7, 5], [30, 70, 50]]
    assert group_sums(values, 8).tolist() == [[15], [150]]
    assert group_sums(values[:, :4], 2).tolist() == [[3, 7], [30, 70]]


@pytest.mark.parametrize("tile", [1, 3, 100])
def test_divergence_and_its_gradients_are_autograds(monkeypatch, tile):
    monkeypatch.setattr(distill, "TILE_BYTES", tile * 4 * 31)
    teacher, teacher_head, states, head = (torch.randn(n, 6) for n in (7, 31, 7, 31))
    ours = torch.zeros_like(head)
    loss, gradient = kl_divergence(teacher, teacher_head, states, head, ours)
    x, w = states.double().requires_grad_(), head.double().requires_grad_()
    with torch.enable_grad():
        p = torch.softmax(teacher.double() @ teacher_head.double().T, -1)
        expected = (p * (p.log() - torch.log_softmax(x @ w.T, -1))).sum(-1).mean()
        expected.backward()
    assert loss == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(gradient, x.grad.float())
    torch.testing.assert_close(ours, w.grad.float())
    assert kl_divergence(teacher, teacher_head, states, head, with_gradient=False) == (loss, None)
    assert kl_divergence(teacher, teacher_head, teacher, teacher_head)[0] == 0


def test_adam_is_torchs_on_scale_and_middle():
    """With steps of `rate` * s for the scale and `rate` * 7.5 s for the middle value of a group."""
    scales, minima = torch.tensor([0.5, 2.0, 0.01]), torch.tensor([-3.0, -20.0, 0.02])
    ours = Adam(scales.clone(), minima.clone())
    # in units of their steps; torch's own epsilon is far larger than the gradients would allow
    s = torch.ones(3, dtype=torch.float64, requires_grad=True)
    c = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.Adam([s, c], lr=0.02, betas=distill.BETAS, eps=0)
    size = scales.double()
    for step in range(5):
        by_scale, by_minimum = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        ours.step(by_scale, by_minimum, 0.02)
        s.grad = (by_scale.double() - 7.5 * by_minimum.double()) * size
        c.grad = by_minimum.double() * 7.5 * size
        theirs.step()
    new_scale, new_middle = s.detach() * size, minima.double() + 7.5 * size + c.detach() * 7.5 * size
    torch.testing.assert_close(ours.scales, new_scale.float())
    torch.testing.assert_close(ours.minima, (new_middle - 7.5 * new_scale).float(), rtol=1e-5, atol=1e-5)


def test_a_group_of_one_value_stays_as_it_is():
    optimizer = Adam(torch.tensor([0.0, 1.0]), torch.tensor([0.3, 0.3]))
    optimizer.step(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 5.0]), 0.1)
    assert optimizer.scales[0] == 0 and optimizer.minima[0] == pytest.approx(0.3)
    assert optimizer.minima[1] != pytest.approx(0.3) and bool(torch.isfinite(optimizer.minima).all())


def test_a_scale_never_turns_negative():
    optimizer = Adam(torch.tensor([1.0]), torch.tensor([0.0]))
    for _ in range(3):
        optimizer.step(torch.tensor([1.0]), torch.tensor([0.0]), 0.6)
    assert optimizer.scales.tolist() == [0.0]


def test_the_rate_rises_then_falls():
    shares = [rate_share(step, 64) for step in range(64)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[4:] == sorted(shares[4:], reverse=True)
    assert shares[34] == pytest.approx(0.05 + 0.95 / 2) and 0.05 < shares[-1] < 0.06
    assert [rate_share(0, 1), rate_share(1, 2)] == [1.0, 1.0]


def test_an_epoch_takes_every_row_once_in_a_new_order():
    rows = [3, 5, 8, 13, 21, 34]
    taken = [row for step in range(3) for row in batch_rows(rows, 4, step, seed=1)]
    assert sorted(taken[:6]) == sorted(taken[6:]) == rows and taken[:6] != taken[6:]
    assert taken[:4] != batch_rows(rows, 4, 0, seed=2)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A model, calibration text in two corpora, and a packed checkpoint."""
    folder = tmp_path_factory.mktemp("distill")
    original = open_folder(write_tiny_model(folder / "model", "llama", tied=True, num_key_value_heads=3))
    draw = np.random.default_rng(0)
    np.savez(folder / "calib.npz", a=draw.integers(0, 512, (15, 32)), b=draw.integers(0, 512, (10, 32)))
    with torch.no_grad():
        start = start_checkpoint(original, folder / "start", keep_bf16="1.self_attn.o_proj")
    return original, folder / "calib.npz", start


def start_checkpoint(original, folder, keep_bf16=None):
    """Rounded to nearest, and then all scales 6 % too large: an error that scales and minima can undo."""
    writer, recipe = PackedWriter(folder, "d"), {"group_size": 64, "mse": False, "keep_bf16": keep_bf16}
    add = writer.add_quantized
    writer.add_quantized = lambda name, codes, scales, *rest, **more: add(name, codes, scales * 1.06, *rest, **more)
    shards = run_rtn.quantize_model(original.source, original.config, recipe, writer, None)
    writer.finish(shards, recipe, original.folder)
    return folder / INDEX


def distilled(begun, folder, **changes):
    original, calibration, start = begun
    writer, recipe = PackedWriter(folder, "e"), RECIPE | changes
    shards = run_distill.quantize_model(original.source, original.config, recipe, writer, calibration, [start])
    writer.finish(shards, recipe, original.folder)
    return writer.facts["distillation"]["curve"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_held_out_loss_falls_and_only_scales_and_minima_move(begun, tmp_path):
    curve = distilled(begun, tmp_path)
    assert [point["step"] for point in curve] == [0, 2, 4, 6]
    assert curve[-1]["held_out"] < 0.9 * curve[0]["held_out"]
    before, after = PackedSource(begun[2].parent), PackedSource(tmp_path)
    assert before.infos() == after.infos()
    for name in before.schemes:
        old, new = before.packed(name), after.packed(name)
        assert torch.equal(old.codes, new.codes) and not torch.equal(old.scales, new.scales)
        assert not torch.equal(old.minima, new.minima)
    plain = set(before.infos()) - set(before.schemes)
    assert "model.layers.1.self_attn.o_proj.weight" in plain and len(plain) == 7
    assert all(torch.equal(before.get(name), after.get(name)) for name in plain)


def test_the_score_is_the_divergence_of_what_is_written(begun, tmp_path):
    """Against the whole models' logits, from the checkpoints as any other step reads them."""
    from yardstick.models.prefill import final_hidden_states, head_rows

    curve = distilled(begun, tmp_path)
    original, calibration, start = begun
    arrays = np.load(calibration)
    ids = torch.from_numpy(np.concatenate([arrays["a"][[2, 7, 12]], arrays["b"][[2, 7]]]))

    def log_probabilities(source):
        states = final_hidden_states(source, original.config, ids, torch.float32, 2)
        return torch.log_softmax((states @ head_rows(source, original.config)[:].float().T).double(), -1)

    wanted = log_probabilities(original.source)
    for folder, point in ((start.parent, curve[0]), (tmp_path, min(curve, key=lambda p: p["held_out"]))):
        found = (wanted.exp() * (wanted - log_probabilities(PackedSource(folder)))).sum(-1).mean()
        assert float(found) == pytest.approx(point["held_out"], rel=1e-5)


def test_a_stopped_run_ends_in_the_same_bytes(begun, tmp_path, monkeypatch):
    curve = distilled(begun, tmp_path / "whole")
    step, done = run_distill.DistillRun.step, []

    def stopping(self, *arguments):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(1)
        return step(self, *arguments)

    monkeypatch.setattr(run_distill.DistillRun, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        distilled(begun, tmp_path / "part")
    assert {"teacher.safetensors", "training.safetensors"} == set(contents(tmp_path / "part"))
    monkeypatch.setattr(run_distill.DistillRun, "step", lambda *arguments: done.append(1) or step(*arguments))
    assert distilled(begun, tmp_path / "part") == curve
    assert len(done) == 5 + 2
    assert contents(tmp_path / "part") == contents(tmp_path / "whole")
    assert distilled(begun, tmp_path / "part") == curve and len(done) == 7


def test_a_large_models_layers_are_run_twice_with_the_same_result(begun, tmp_path, monkeypatch):
    distilled(begun, tmp_path / "whole", steps=2)
    monkeypatch.setattr(run_distill, "GRAPH_BYTES", 0)
    distilled(begun, tmp_path / "twice", steps=2)
    assert contents(tmp_path / "twice") == contents(tmp_path / "whole")


def test_where_nothing_beats_the_start_its_own_values_are_written(begun, tmp_path):
    curve = distilled(begun, tmp_path, rate=0.9)
    assert all(point["held_out"] > curve[0]["held_out"] for point in curve[1:])
    before, after = PackedSource(begun[2].parent), PackedSource(tmp_path)
    for name in before.schemes:
        old, new = before.packed(name), after.packed(name)
        assert torch.equal(old.scales, new.scales) and torch.equal(old.minima, new.minima)


def test_a_hybrid_model_with_a_head_of_its_own_is_distilled(tmp_path, begun):
    original = open_folder(write_tiny_model(tmp_path / "model", "qwen3_5", tied=False, layers=4))
    start = start_checkpoint(original, tmp_path / "start")
    curve = distilled((original, begun[1], start), tmp_path / "out", steps=4)
    assert curve[-1]["held_out"] < curve[0]["held_out"]
    record = json.loads((tmp_path / "out" / INDEX).read_text())["metadata"]["yardstick"]
    assert len(record["tensors"]) == 3 * 6 + 7 + 1
