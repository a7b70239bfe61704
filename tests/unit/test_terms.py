"""Matrices that are stored as a sum of two terms, from the quantizer to the engine."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import write_rtn_checkpoint, write_tiny_model
from yardstick.engine.linear import QuantLinear, explain
from yardstick.engine.model import can_be_joined, engine_shapes, load_layer, load_packed, open_model
from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states, head_rows
from yardstick.plan.sizes import variant_bits
from yardstick.quantize import run_distill, run_mix
from yardstick.quantize.checkpoint import INDEX, PackedWriter
from yardstick.quantize.distill import Matrix
from yardstick.quantize.grid import Grid, round_in_terms, round_to_nearest
from yardstick.quantize.pack import dequantize, sum_of_terms
from yardstick.rivals.export_folder import export_folder
from yardstick.sources.packed import PackedSource

HEAD = "lm_head.weight"


@pytest.fixture(autouse=True)
def as_a_step_runs():
    """No gradients unless they are asked for, as `exact_arithmetic` leaves it."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A model, calibration text, and checkpoints of one and of two terms."""
    folder = tmp_path_factory.mktemp("terms")
    original = open_folder(write_tiny_model(folder / "model", "llama", tied=True, num_key_value_heads=3))
    np.savez(folder / "calib.npz", a=np.random.default_rng(0).integers(0, 512, (12, 32)))
    one, two = (write_rtn_checkpoint(original, folder / str(terms), 64, terms=terms) for terms in (1, 2))
    return original, folder / "calib.npz", one, two


def test_the_second_term_rounds_what_the_first_leaves():
    """By hand: a group of four; [-7.5, 7.5] in 15 steps of 1, then what is left, of [-0.5, 0.25], in steps of 0.05."""
    weights = torch.tensor([[-7.5, 7.5, 0.75, 2.0]])
    codes, scales, minima = round_in_terms(weights, Grid(4), 2)
    assert scales[0, 0] == 1 and minima[0, 0] == -7.5 and codes[0].tolist() == [0, 15, 8, 10]  # 0.5 and 2.5
    left = torch.tensor([[0.0, 0.0, 0.25, -0.5]])
    alone = round_to_nearest(left, Grid(4))
    for found, wanted in zip((codes, scales, minima), alone, strict=True):
        assert torch.equal(found[1:], wanted)
    assert codes[1].tolist() == [10, 10, 15, 0]
    restored = sum_of_terms(dequantize(codes, scales, minima, 4), 2)
    assert float((restored - weights).abs().max()) < 0.003  # -0.5 + 15 * bf16(0.05)


def test_a_checkpoint_of_two_terms_is_sixteen_times_closer_and_counts_all_its_bits(begun):
    original, _, one, two = begun
    coarse, fine = PackedSource(one.parent), PackedSource(two.parent)
    names = [*original.config.body_matrices(), HEAD]
    bits = variant_bits(original.config, {"method": "rtn", "group_size": 64, "terms": 2, "keep_bf16": None})
    for name in names:
        wanted = original.source.get(original.config.head_name if name == HEAD else name).float()
        errors = [float((source.get(name) - wanted).norm() / wanted.norm()) for source in (coarse, fine)]
        assert errors[1] < errors[0] / 8
        assert fine.infos()[name].scheme == "2xint4-g64" and fine.infos()[name].shape == tuple(wanted.shape)
        assert fine.infos()[name].bits == 2 * coarse.infos()[name].bits == bits[name]
        rows = fine.rows(name)
        assert torch.equal(rows[5:23], fine.get(name)[5:23]) and torch.equal(rows[3:], fine.get(name)[3:])


def test_terms_that_the_index_does_not_say_rightly_are_refused(begun, tmp_path):
    for path in begun[3].parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = json.loads((tmp_path / INDEX).read_text())
    scheme = index["metadata"]["yardstick"]["tensors"][HEAD]
    for terms, message in (
        (3, "names 3 terms, not 1 to 2"),
        ("2", "names '2' terms"),
        (1, r"weight_codes is U8 .*asks for U8"),
        (True, "names True terms"),
    ):
        scheme["terms"] = terms
        (tmp_path / INDEX).write_text(json.dumps(index))
        with pytest.raises(YardstickError, match=message):
            PackedSource(tmp_path)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_layer_adds_its_terms_up(rows):
    weights = torch.randn(37, 90)
    packed = PackedWeight.pack(*round_in_terms(weights, Grid(32), 2), 32)
    packed = PackedWeight(packed.codes, packed.scales, packed.minima, 90, 32, terms=2)
    layer, x = QuantLinear(packed), torch.randn(2, rows, 90)
    expected = x @ sum_of_terms(packed.dequantize(), 2).T
    assert layer.out_features == 37 and layer(x).shape == (2, rows, 37)
    assert float((layer(x) - expected).norm() / expected.norm()) < 1e-5
    assert "90 to 37, 2 terms of int4" in layer.extra_repr() and len(list(explain(layer))) == 1
    some = QuantLinear(packed.rows(20))
    assert float((some(x) - layer(x)[..., :20]).abs().max()) < 1e-4
    with pytest.raises(YardstickError, match="cannot be stacked"):
        PackedWeight.stack([packed, packed])


def test_the_engine_runs_such_a_checkpoint(begun):
    original, source = begun[0], PackedSource(begun[3].parent)
    ids = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(5))
    expected = final_hidden_states(source, original.config, ids, torch.float32, 2)
    expected = expected @ head_rows(source, original.config)[:].T
    model = AutoModelForCausalLM.from_pretrained(original.folder, dtype=torch.float32)
    assert set(load_packed(model, source)) == {name.removesuffix(".weight") for name in source.schemes}
    assert float((model(ids).logits - expected).norm() / expected.norm()) < 1e-4
    load = partial(load_layer, path=None)
    found = final_hidden_states(source, original.config, ids, torch.float32, 2, load=load)
    head = open_model(source, original.config, torch.float32, 500).head
    assert float((head(found) - expected[..., :500]).norm() / expected.norm()) < 1e-4


def test_shapes_hold_the_rows_of_all_terms(begun):
    config = begun[0].config
    plain = engine_shapes(config, lambda name: 64)
    double = engine_shapes(config, lambda name: 64, lambda name: 2)
    assert any("+" in name for name in plain) and not any("+" in name for name in double)
    assert double["lm_head"] == (2 * config.vocab_size, config.hidden_size, 64)
    assert double["mlp.down_proj"][0] == 2 * plain["mlp.down_proj"][0]
    assert can_be_joined([(64, 1), (64, 1)]) and not can_be_joined([(64, 2), (64, 2)])
    assert not can_be_joined([(64, 1), (32, 1)]) and not can_be_joined([(None, None), (None, None)])


def test_gradients_of_both_terms_are_those_of_a_dense_graph():
    codes = torch.randint(0, 16, (24, 40), dtype=torch.uint8)
    scales, minima = (torch.rand(24, 3) + 0.5).bfloat16().float(), torch.randn(24, 3).bfloat16().float()
    matrix = Matrix(codes, scales, minima, torch.zeros(24, 3), torch.zeros(24, 3), 16, terms=2)
    inputs, group = torch.randn(5, 40), torch.arange(40) // 16
    s, m = scales.double().requires_grad_(), minima.double().requires_grad_()
    ours = inputs.clone().requires_grad_()
    with torch.enable_grad():
        stacked = codes.double() * s[:, group] + m[:, group]
        (inputs.double() @ (stacked[:12] + stacked[12:]).T).pow(2).mean().backward()
        matrix(ours).pow(2).mean().backward()
    for found, wanted in ((matrix.scale_gradients, s.grad), (matrix.minimum_gradients, m.grad)):
        assert float((found - wanted).norm() / wanted.norm()) < 1e-6


def test_such_a_checkpoint_is_distilled_and_mixed(begun, tmp_path):
    original, calibration, one, two = begun
    recipe = {"steps": 2, "batch_tokens": 64, "rate": 0.01, "held_out": 0.2, "score_every": 1, "seed": 0}
    writer = PackedWriter(tmp_path / "distilled", "d")
    shards = run_distill.quantize_model(original.source, original.config, recipe, writer, calibration, [two])
    writer.finish(shards, recipe, two.parent)
    assert PackedSource(tmp_path / "distilled").infos() == PackedSource(two.parent).infos()

    recipe = {"of": ["one", "two"], "bits": 5.5, "positions": 128, "held_out": 0.25}
    writer = PackedWriter(tmp_path / "mixed", "m")
    shards = run_mix.quantize_model(original.source, original.config, recipe, writer, calibration, [one, two])
    writer.finish(shards, recipe, two.parent)
    found, chosen = PackedSource(tmp_path / "mixed"), writer.facts["mix"]["matrices"]
    assert {entry["variant"] for entry in chosen.values()} == {"one", "two"}
    for name, entry in chosen.items():
        assert torch.equal(found.get(name), PackedSource((one if entry["variant"] == "one" else two).parent).get(name))


def test_an_export_of_two_terms_is_refused(begun, tmp_path):
    with pytest.raises(YardstickError, match="is a sum of terms, which compressed-tensors does not have"):
        export_folder(PackedSource(begun[3].parent), None, tmp_path / "out")
