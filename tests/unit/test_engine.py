"""The engine: every path gives the reference's product, and models with packed matrices are those without."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny_model
from tests.unit.test_kernels import packed
from yardstick.engine.choose import Entry, choose
from yardstick.engine.linear import QuantLinear, explain
from yardstick.engine.model import load_layer, load_packed, open_model, quantize_model
from yardstick.engine.paths import PATHS, open_path
from yardstick.errors import YardstickError
from yardstick.models.folder import open_folder
from yardstick.models.generate import Model, Text, generate, greedy
from yardstick.models.prefill import final_hidden_states, pick_device
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.run_rtn import quantize_model as write_rtn
from yardstick.sources import open_source

SHAPES = [(70, 200, 32), (33, 577, 64), (131, 448, 128)]


def paths_here(weight) -> list[str]:
    return [name for name, path in PATHS.items() if path.refusal(weight, weight.codes.device) is None]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_path_is_the_reference(shape, symmetric):
    weight = packed(*shape, symmetric)
    assert len(paths_here(weight)) >= 5  # all but the other device's
    for name in paths_here(weight):
        for rows in (1, 2, 19):
            if rows not in PATHS[name].rows:
                continue
            x = torch.randn(rows, shape[1], device=weight.codes.device)
            expected = x.double() @ weight.dequantize().double().T
            found = open_path(name, weight, torch.float32)(x)
            assert found.dtype == torch.float32 and found.shape == expected.shape
            assert (found - expected).norm() / expected.norm() < 1e-5, (name, rows)


def test_bf16_inputs_give_bf16_outputs_that_differ_by_rounding_alone():
    weight = packed(70, 200, 32)
    x = torch.randn(5, 200, device=pick_device()).bfloat16()
    expected = x.double() @ weight.dequantize().double().T
    for name in paths_here(weight):
        if 5 in PATHS[name].rows:
            found = open_path(name, weight, torch.bfloat16)(x)
            assert found.dtype == torch.bfloat16
            assert (found - expected).norm() / expected.norm() < 2**-8, name


def test_a_group_size_that_a_path_cannot_take_is_named():
    weight = packed(40, 100, 48)
    for name in ("torch-int4", "triton-gemv", "triton-gemm"):
        with pytest.raises(YardstickError, match=f"path {name}: it .*of 48"):
            open_path(name, weight, torch.float32)
    x = torch.randn(3, 100, device=pick_device())
    assert (QuantLinear(weight)(x) - x @ weight.dequantize().T).abs().max() < 1e-4  # and the layer takes another
    with pytest.raises(YardstickError, match="no path 'fast' through the engine"):
        open_path("fast", weight, torch.float32)


def test_a_layer_says_what_it_does_and_keeps_its_scales():
    weight = packed(70, 200, 32)
    layer = QuantLinear(weight, bias=torch.randn(70, device=pick_device()), path="triton-gemm")
    x = torch.randn(2, 3, 200, device=pick_device())
    expected = torch.nn.functional.linear(x, weight.dequantize(), layer.bias)
    assert (layer(x) - expected).abs().max() < 1e-4 and layer(x).shape == (2, 3, 70)
    with pytest.raises(YardstickError, match="triton-gemm does not take 65 rows"):
        layer(torch.randn(65, 200, device=pick_device()))
    moved = layer.to(torch.float64)
    assert torch.equal(moved.weight.scales, weight.scales) and moved.bias.dtype == torch.float64
    holder = torch.nn.ModuleDict({"a": layer, "b": torch.nn.Linear(3, 4)})
    assert list(explain(holder, 2)) == ["a (200 to 70, int4 in groups of 32): triton-gemm: asked for"]


def entry(rows, path, out_features=70, in_features=200, group_size=32, dtype="float32"):
    return Entry(dtype, out_features, in_features, group_size, rows, path, {}, 12.0)


def test_the_nearest_measurement_decides():
    weight = packed(70, 200, 32)
    entries = [entry(1, "dequantize"), entry(8, "dense"), entry(1, "dense", out_features=7000)]
    assert choose(weight, torch.float32, 1, entries).path == "dequantize"
    assert choose(weight, torch.float32, 2, entries).path == "dequantize"  # nearer to 1 than to 8 as a ratio
    assert choose(weight, torch.float32, 3, entries).path == "dense"
    assert choose(weight, torch.float32, 500, entries).path == "dense"
    assert choose(packed(5000, 200, 32), torch.float32, 1, entries).path == "dense"  # the nearer shape
    assert "70 x 200, 8 rows: 12 us" in choose(weight, torch.float32, 8, entries).why
    # another type or group size, or a path that cannot take it here, is no measurement
    for other in ([entry(1, "dense", dtype="bfloat16")], [entry(1, "dense", group_size=64)], [entry(2, "triton-gemv")]):
        assert "nothing was measured" in choose(weight, torch.float32, 2, other).why


def test_without_a_measurement_the_type_of_the_inputs_decides():
    weight = packed(70, 200, 32)
    if torch.cuda.is_available():
        assert choose(weight, torch.bfloat16, 1, ()).path == "triton-gemv"
        assert choose(weight, torch.bfloat16, 40, ()).path == "triton-gemm"
        assert choose(weight, torch.bfloat16, 65, ()).path == "dequantize"
    else:
        assert choose(weight, torch.float32, 1, ()).path == "dense"
        assert choose(weight, torch.bfloat16, 32, ()).path == "torch-int4"
        assert choose(packed(70, 200, 48), torch.bfloat16, 32, ()).path == "dense"  # no groups of 48


@pytest.fixture(scope="module", params=[("llama", True, 2), ("qwen2", False, 2), ("qwen3_5", False, 4)])
def checkpoint(request, tmp_path_factory):
    """A tiny original and its round-to-nearest checkpoint."""
    family, tied, layers = request.param
    folder = tmp_path_factory.mktemp("engine")
    original = open_folder(write_tiny_model(folder / "model", family, tied, layers=layers))
    recipe = {"group_size": 32, "mse": False, "keep_bf16": None}
    writer = PackedWriter(folder / "rtn", "d")
    with torch.no_grad():
        writer.finish(write_rtn(original.source, original.config, recipe, writer, None), recipe, original.folder)
    return original, open_source(f"packed:{folder / 'rtn'}", original.config, original.source)


@pytest.mark.parametrize("path", [None, "torch-int4", "triton-shuffled"])
@torch.no_grad()
def test_our_forward_with_packed_matrices_is_that_without(checkpoint, path):
    original, source = checkpoint
    if path == "triton-shuffled" and original.config.delta and not torch.cuda.is_available():
        pytest.skip("interpreted, the many matrices of this family take half a minute")
    config, ids = original.config, torch.randint(0, 512, (2, 30))
    plain = final_hidden_states(source, config, ids, torch.float32, 2)
    found = final_hidden_states(source, config, ids, torch.float32, 2, load=partial(load_layer, path=path))
    assert (found - plain).norm() / plain.norm() < 1e-5
    layer = load_layer(source, config, config.num_layers - 1, torch.float32, pick_device(), path)
    assert "mlp.gate_proj+mlp.up_proj" in layer and "mlp.gate_proj.weight" not in layer
    assert "self_attn.q_proj+self_attn.k_proj+self_attn.v_proj" in layer


@torch.no_grad()
def test_generation_with_packed_matrices_writes_the_same(checkpoint):
    original, source = checkpoint
    config = original.config

    def written(model) -> list[list[int]]:
        texts = [
            Text(key, torch.randint(0, 512, (4 + key,), generator=torch.Generator().manual_seed(key)).tolist())
            for key in range(3)
        ]
        ended = lambda text: "whole" if len(text.written) == 12 else None  # noqa: E731
        return [
            text.written for text, _ in sorted(generate(model, texts, 2, 32, greedy, ended), key=lambda t: t[0].key)
        ]

    plain = Model(source, config, torch.float32, 500)
    engine = open_model(source, config, torch.float32, 500)
    assert isinstance(engine.head, QuantLinear) and engine.head.out_features == 500
    assert written(engine) == written(plain)


@torch.no_grad()
def test_a_transformers_model_is_changed_in_place(checkpoint):
    original, source = checkpoint
    ids = torch.randint(0, 500, (1, 9))
    recipe = {"method": "rtn", "group_size": 32}

    def fresh():
        return AutoModelForCausalLM.from_pretrained(original.folder, dtype=torch.float32).eval()

    expected = fresh()
    for name, layer in expected.named_modules():
        full = f"{name}.weight"
        if isinstance(layer, torch.nn.Linear) and full in source.schemes:
            layer.weight = torch.nn.Parameter(source.get(full))  # a tied head takes leave of the embedding
    loaded, made = fresh(), fresh()
    names = load_packed(loaded, source)
    assert "lm_head" in names and len(names) == len(source.schemes)
    assert (loaded(ids).logits - expected(ids).logits).abs().max() < 1e-4
    made_names = quantize_model(made, recipe, skip="in_proj_[ab]$")
    assert made_names == names
    assert (made(ids).logits - expected(ids).logits).abs().max() < 1e-4
    assert not any(isinstance(layer, torch.nn.Linear) for name, layer in made.named_modules() if name in names)
    kept = fresh()
    assert "lm_head" not in quantize_model(kept, recipe, skip="lm_head")
    assert isinstance(kept.lm_head, torch.nn.Linear)
    with pytest.raises(YardstickError, match="rounds to nearest"):
        quantize_model(fresh(), {"method": "gptq", "group_size": 32})
    with pytest.raises(YardstickError, match="no linear layer to replace"):
        quantize_model(fresh(), recipe, skip=".")
