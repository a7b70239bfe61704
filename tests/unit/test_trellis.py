"""The trellis format by hand, its search by brute force, its feedback by definition, checkpoints and their reader."""

import itertools
import json
import math
import shutil
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.tiny import write_tiny_model
from tests.unit.test_gptq import correlated_hessian
from yardstick.cli import quantize
from yardstick.errors import YardstickError
from yardstick.files import write_json
from yardstick.load_experiment import load_experiment
from yardstick.manifest import write_manifest
from yardstick.plan.sizes import trellis_bits
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.pack import unpack_nibbles
from yardstick.quantize.run_trellis import encoded
from yardstick.quantize.trellis import codebook, dequantize, rotate, states, unrotate
from yardstick.quantize.trellis_search import quantize_trellis
from yardstick.quantize.viterbi import compiled, viterbi
from yardstick.sources import open_source


def test_states_are_windows_of_the_last_bits():
    symbols = torch.tensor([[3, 10, 1, 15], [0, 0, 7, 2]], dtype=torch.uint8)
    assert states(symbols, 8).tolist() == [[0x03, 0x3A, 0xA1, 0x1F], [0, 0, 0x07, 0x72]]
    assert states(symbols, 10).tolist() == [[0x003, 0x03A, 0x3A1, 0x21F], [0, 0, 0x007, 0x072]]
    assert states(symbols, 12).tolist() == [[0x003, 0x03A, 0x3A1, 0xA1F], [0, 0, 0x007, 0x072]]


def test_values_of_states_by_hand():
    """State 3 of 256: 3 * 49 = 147, the quantile of 147.5 / 256. State 37 of 1024: 37 * 67 = 2479 = 2 * 1024 + 431."""
    values = codebook(8)
    assert float(values[3]) == float(torch.tensor(1.16 * NormalDist().inv_cdf(147.5 / 256)).half())
    assert float(codebook(10)[37]) == float(torch.tensor(1.14 * NormalDist().inv_cdf(431.5 / 1024)).half())
    assert float(values.max()) == float(torch.tensor(1.16 * NormalDist().inv_cdf(255.5 / 256)).half())


@pytest.mark.parametrize("state_bits", [8, 10, 12, 14, 16])
def test_the_ways_out_of_a_state_and_into_it_are_spread_over_the_distribution(state_bits):
    """One value in each sixteenth of the quantiles, or two in one and none beside it: never a hole of two."""
    ranks = codebook(state_bits).argsort().argsort()
    cells = ranks * 16 >> state_bits
    for ways in (cells.view(-1, 16), cells.view(16, -1).T):  # behind a state, and before one
        gaps = ways.sort(dim=1).values.diff(dim=1)
        assert int(gaps.max()) <= 2 and ways.unique(dim=0).shape[0] > 1
    if state_bits <= 12:  # beyond, fp16 rounds neighbours to one
        assert len(codebook(state_bits).unique()) == 1 << state_bits


def hand_rotation(width):
    """R by definition: Hadamard entries are signs of common bits, Hartley entries cos + sin; up to the random signs."""
    power = width & -width
    odd = width // power
    rows = np.empty((width, width))
    for i, j in itertools.product(range(width), range(width)):
        angle = 2 * math.pi * (i // power) * (j // power) / odd
        rows[i, j] = (math.cos(angle) + math.sin(angle)) * (-1) ** ((i % power) & (j % power)).bit_count()
    return torch.tensor(rows / math.sqrt(width))


@pytest.mark.parametrize("width", [1, 7, 8, 12, 40, 144])
def test_the_rotation_is_hartley_times_hadamard_times_signs(width):
    matrix = rotate(torch.eye(width)).T.double()  # R
    signs = matrix / hand_rotation(width)
    torch.testing.assert_close(signs, signs[:1].round().expand(width, width), atol=1e-4, rtol=0)
    assert set(signs[0].round().tolist()) <= {-1.0, 1.0} and (width < 40 or 0.3 < (signs[0] > 0).double().mean() < 0.7)
    weights = torch.randn(5, width)
    torch.testing.assert_close(rotate(weights), (weights.double() @ matrix.T).float())
    torch.testing.assert_close(unrotate(rotate(weights)), weights)


@pytest.mark.parametrize(("symbol_bits", "state_bits", "steps"), [(1, 2, 9), (1, 4, 9), (2, 4, 5), (2, 6, 5)])
def test_viterbi_finds_what_trying_all_finds(symbol_bits, state_bits, steps):
    rng = np.random.default_rng(state_bits)
    values = rng.standard_normal(1 << state_bits).astype(np.float32)
    targets = rng.standard_normal((7, steps)).astype(np.float32)
    mask, best = (1 << state_bits) - 1, [(math.inf, None)] * 7
    for symbols in itertools.product(range(1 << symbol_bits), repeat=steps):
        state, found = 0, []
        for symbol in symbols:
            state = (state << symbol_bits | symbol) & mask
            found.append(values[state])
        costs = np.square(np.array(found, dtype=np.float64) - targets).sum(1)
        best = [min(old, (cost, symbols), key=lambda way: way[0]) for old, cost in zip(best, costs, strict=True)]
    found = viterbi(torch.from_numpy(targets), torch.from_numpy(values), symbol_bits)
    assert found.tolist() == [list(symbols) for _, symbols in best]


def step_by_step(targets, values):
    """The search for one sequence in numpy, with all costs of all states and decisions kept."""
    costs, decisions = np.full(len(values), np.inf, dtype=np.float32), []
    costs[0] = 0
    for target in targets:
        ways = costs.reshape(16, -1)  # states with the same end lead to the same ones
        decisions.append(ways.argmin(0))
        costs = np.repeat(ways.min(0), 16) + np.square(values - target)
    state, symbols = int(costs.argmin()), []
    for decision in reversed(decisions):
        symbols.append(state % 16)
        state = int(decision[state // 16]) * (len(values) // 16) + state // 16
    return symbols[::-1]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_search_of_sixteen_values_a_symbol_is_the_one_in_numpy(threads, monkeypatch):
    """Bit for bit, ties included: half of the targets are values of states, and whole numbers make equal costs."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for values in (codebook(10), codebook(8).round()):
        targets = torch.randn(7, 40)
        targets[:, ::2] = values[torch.randint(len(values), (7, 20))]
        found = viterbi(targets, values)
        assert found.tolist() == [step_by_step(row, values.numpy()) for row in targets.numpy()]


def test_without_a_compiler_or_with_one_that_fails_there_is_one_line(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(YardstickError, match="there is no C compiler: install gcc"):
        compiled.__wrapped__(16)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/false")
    with pytest.raises(YardstickError, match="searched in C, and /bin/false fails"):
        compiled.__wrapped__(16)


@pytest.mark.parametrize(("state_bits", "bound"), [(8, 0.0059), (10, 0.0052), (12, 0.0050), (14, 0.0048)])
def test_error_on_normal_numbers(state_bits, bound):
    """A uniform grid of 16 levels has 0.0100 at group 128, the best that 4 bits allow is 0.0039."""
    targets, values = torch.randn(24, 256), codebook(state_bits)
    found = values[states(viterbi(targets, values), state_bits)]
    assert 0.0042 < float((found - targets).square().mean()) < bound


def decoded_by_hand(parts, shape, state_bits):
    """One weight after the other, from the bytes."""
    packed, scales = parts[".weight_trellis"], parts[".weight_scales"]
    values, rotated = codebook(state_bits), torch.empty(shape, dtype=torch.float64)
    for row, column in itertools.product(range(shape[0]), range(shape[1])):
        tile = packed[row // 64, column // 4].tolist()
        bits = sum(byte >> 4 << 8 * i + 4 | (byte & 15) << 8 * i for i, byte in enumerate(tile))
        symbols = [bits >> 4 * i & 15 for i in range(256)]
        last = column % 4 * 64 + row % 64
        window = symbols[max(0, last - 2) : last + 1]
        state = int("".join(f"{symbol:04b}" for symbol in window), 2) % (1 << state_bits)
        rotated[row, column] = float(values[state]) * float(scales[row])
    return rotated @ rotate(torch.eye(shape[1])).T.double()


def test_codes_are_decoded_weight_by_weight():
    shape, weights = (70, 10), torch.randn(70, 10) * torch.logspace(-1, 1, 70)[:, None]
    parts, _ = encoded(quantize_trellis(weights, torch.eye(10), 10, 0.01, "w"), shape, 10)
    assert parts[".weight_trellis"].shape == (2, 3, 128) and parts[".weight_scales"].shape == (70,)
    ours = dequantize(parts[".weight_trellis"], parts[".weight_scales"], 10, 10)
    torch.testing.assert_close(ours.double(), decoded_by_hand(parts, shape, 10), atol=1e-5, rtol=1e-5)
    # each row is as far off as another, in its own scale
    relative = ((ours - weights).norm(dim=1) / weights.norm(dim=1)).square()
    assert float(relative.mean()) < 0.008


def test_a_row_of_zeros_stays_zero():
    weights = torch.randn(3, 8)
    weights[1] = 0
    parts, _ = encoded(quantize_trellis(weights, torch.eye(8), 8, 0.01, "w"), (3, 8), 8)
    assert dequantize(parts[".weight_trellis"], parts[".weight_scales"], 8, 8)[1].tolist() == [0.0] * 8


def test_errors_are_spread_as_the_definition_says():
    """After each tile the columns to come take the values that make up best for its error: with H of the rotated
    basis and B, L the columns of the tile and behind it, W_L += (W_B - Q_B) H_BL H_LL^-1, in fp64."""
    weights, hessian, in_features = torch.randn(128, 150), correlated_hessian(150), 150
    ours = quantize_trellis(weights, hessian, 8, 0.01, "w")
    turn = rotate(torch.eye(in_features)).T.double()
    turned = turn @ hessian.double() @ turn.T
    turned += 0.01 * turned.diagonal().mean() * torch.eye(in_features, dtype=torch.float64)
    columns = (weights.double() @ turn.T) / ours.scales.double()[:, None]
    columns = torch.nn.functional.pad(columns, (0, 2))
    values, agreeing = codebook(8), []
    for tile in range(38):
        first, last = 4 * tile, min(4 * tile + 4, in_features)
        for half in range(2):
            rows = slice(64 * half, 64 * half + 64)
            targets = columns[rows, first : first + 4].T.reshape(1, 256).float()
            agreeing.append((viterbi(targets, values)[0] == ours.symbols[half, tile]).float().mean())
            # go on from our symbols: a near tie that falls the other way would move all that follows
            restored = values[states(ours.symbols[half, tile], 8)].view(4, 64).T.double()
            errors = (columns[rows, first : first + 4] - restored)[:, : last - first]
            cross = turned[first:last, last:] @ torch.linalg.inv(turned[last:, last:])
            columns[rows, last:in_features] += errors @ cross
    assert float(torch.stack(agreeing).mean()) > 0.99


def test_feedback_lowers_the_output_error_and_raises_the_weights():
    weights, hessian = torch.randn(64, 96), correlated_hessian(96)
    found = []
    for used in (hessian, torch.eye(96)):
        parts, _ = encoded(quantize_trellis(weights, used, 8, 0.01, "w"), (64, 96), 8)
        difference = weights - dequantize(parts[".weight_trellis"], parts[".weight_scales"], 96, 8)
        found.append((float(((difference @ hessian) * difference).sum()), float(difference.square().sum())))
    (with_feedback, weight_error), (without, least) = found
    assert with_feedback < 0.7 * without and weight_error > least


# Checkpoints


def write_checkpoint(folder, shape=(70, 10), state_bits=8):
    writer, result = PackedWriter(folder, "d"), quantize_trellis(torch.randn(shape), torch.eye(shape[1]), 8, 0.01, "w")
    parts, scheme = encoded(result, shape, state_bits)
    writer.add_encoded("x.weight", parts, scheme)
    writer.add_plain("n.weight", torch.ones(5, dtype=torch.bfloat16))
    writer.finish_shard("only")
    writer.finish(["only"], {"method": "trellis"}, folder / "no-model")
    return dequantize(parts[".weight_trellis"], parts[".weight_scales"], shape[1], state_bits)


def test_the_source_gives_the_values_their_rows_and_exact_bits(tmp_path):
    expected = write_checkpoint(tmp_path)
    source = open_source(f"trellis:{tmp_path}")
    info = source.infos()["x.weight"]
    assert (info.scheme, info.shape) == ("trellis4-s8", (70, 10))
    # 2 x 3 tiles of 256 weights in 4 bits, the padding of 70 x 10 to 128 x 12 included, and a bf16 scale a row
    assert info.bits == 6 * 1024 + 16 * 70 == trellis_bits((70, 10))
    assert source.infos()["n.weight"].bits == 80
    assert torch.equal(source.get("x.weight"), expected)
    rows = source.rows("x.weight")
    for piece in (slice(0, 3), slice(60, 67), slice(64, 70), slice(66, 99), slice(5, 70)):
        assert torch.equal(rows[piece], expected[piece])


def test_bits_of_the_default_models_matrices():
    """576 inputs: 4 + 16 / 576 bits a weight; 1536 inputs: 4 + 16 / 1536. No padding."""
    assert trellis_bits((192, 576)) == 192 * (4 * 576 + 16) and trellis_bits((576, 1536)) == 576 * (4 * 1536 + 16)


def test_another_format_or_a_damaged_checkpoint_is_refused_in_one_line(tmp_path):
    write_checkpoint(tmp_path / "a")
    with pytest.raises(YardstickError, match="tensor x.weight: the index names no shape .* and group size"):
        open_source(f"packed:{tmp_path / 'a'}")
    index = tmp_path / "a" / "model.safetensors.index.json"
    sound = json.loads(index.read_text())

    def with_scheme(scheme):
        content = json.loads(json.dumps(sound))
        content["metadata"]["yardstick"]["tensors"]["x.weight"] = scheme
        write_json(index, content)
        return lambda: open_source(f"trellis:{tmp_path / 'a'}")

    wrong = [{"shape": [70, 10], "group_size": 32}, {"shape": [70, 10], "state_bits": 9}, {"state_bits": 8}, 7]
    wrong += [{"shape": [70, 10], "state_bits": True}, {"shape": [70, 10], "state_bits": [8]}]
    for scheme in wrong:
        with pytest.raises(YardstickError, match="x.weight: the index names no shape .* and state_bits of 8, 10, "):
            with_scheme(scheme)()
    with pytest.raises(YardstickError, match=r"weight_trellis is U8 \[2, 3, 128\], \[70, 13\] as a trellis asks for"):
        with_scheme({"shape": [70, 13], "state_bits": 8})()
    write_json(index, sound)
    shard = tmp_path / "a" / "only.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-40])
    with pytest.raises(YardstickError, match="only.safetensors: truncated"):
        open_source(f"trellis:{tmp_path / 'a'}")
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(YardstickError, match="only.safetensors: its sha256 is not the one on record"):
        open_source(f"trellis:{tmp_path / 'a'}").get("x.weight")
    tensors = load_file(shard)
    del tensors["x.weight_scales"]
    save_file(tensors, shard)
    with pytest.raises(YardstickError, match="x.weight_scales"):
        open_source(f"trellis:{tmp_path / 'a'}")


def test_a_whole_model_is_quantized_and_resumed_to_the_same_bytes(tmp_path):
    """Through the step itself; heads of 32 rows and a width of 42 leave tiles that are not full."""
    sizes = {"hidden_size": 42, "intermediate_size": 56, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = write_tiny_model(tmp_path / "model", "llama", tied=True, **sizes)
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "calib.npz", a=rng.integers(0, 512, (6, 24)))
    write_manifest(tmp_path / "manifest.json", model, ["config.json", "model.safetensors", "tokenizer.json"])

    def run(name):
        quantize.main(
            SimpleNamespace(
                recipe={"method": "trellis", "state_bits": 8, "damping": 0.01, "keep_bf16": "k_proj"},
                model=tmp_path / "manifest.json",
                calibration=tmp_path / "calib.npz",
                output=tmp_path / name / "model.safetensors.index.json",
                record=tmp_path / f"{name}.json",
                start=None,
            )
        )
        return {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())}

    whole = run("whole")
    (tmp_path / "stopped").mkdir()
    shutil.copy(tmp_path / "whole" / "layer-00000.safetensors", tmp_path / "stopped")
    assert run("stopped") == whole
    record = json.loads((tmp_path / "whole.json").read_text())
    assert len(record["matrices"]) == 2 * 6 + 1 and record["not_below_rtn"] == []
    source = open_source(f"trellis:{tmp_path / 'whole'}")
    original = open_source(f"hf:{model}")
    for name, info in source.infos().items():
        theirs = original.get("model.embed_tokens.weight" if name == "lm_head.weight" else name).float()
        error = float((source.get(name).float() - theirs).norm() / theirs.norm())
        assert error < (0.15 if info.scheme == "trellis4-s8" else 1e-9), name
        assert info.scheme == "trellis4-s8" or info.bits == 16 * info.numel
    assert source.infos()["model.layers.0.self_attn.k_proj.weight"].scheme == "bf16"
    symbols = unpack_nibbles(source.reader.tensor("lm_head.weight_trellis").flatten(0, 1), 256)
    assert len(symbols.unique()) == 16


def test_a_trellis_variant_is_read_as_one_and_is_not_for_the_engine():
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    config["variants"] = {"t": {"method": "trellis"}} | config["variants"]
    experiment = load_experiment(config)
    assert experiment.variants["t"]["state_bits"] == 12
    assert experiment.evaluation_recipe("t")["source"] == "trellis"
    assert experiment.evaluation_recipe("gptq-g64")["source"] == "packed"
    other = load_experiment(config | {"baseline": "t"})
    assert other.engine["candidate"] == "rtn-g32"  # the first that the engine can multiply
    with pytest.raises(YardstickError, match="config: engine.candidate: t is stored as trellis"):
        load_experiment(config | {"engine": {"candidate": "t"}})
    config["rivals"]["ct-gptq-g64"]["variant"] = "t"
    with pytest.raises(YardstickError, match="config: rivals.ct-gptq-g64.variant: t is stored as trellis"):
        load_experiment(config)
