"""The engine: every path gives the reference's product, and models with packed matrices are those without."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import write_rtn_checkpoint, write_tiny_model
from tests.unit.test_kernels import packed
from yardstick.engine.choose import Entry, choose
from yardstick.engine.linear import QuantLinear, explain
from yardstick.engine.model import engine_shapes, load_layer, load_packed, open_model, quantize_model
from yardstick.engine.paths import PATHS, open_path
from yardstick.errors import YardstickError
from yardstick.models.config import read_config
from yardstick.models.folder import open_folder
from yardstick.models.generate import Model, Text, generate, greedy
from yardstick.models.prefill import final_hidden_states, pick_device
from yardstick.quantize.checkpoint import INDEX
from yardstick.sources import open_source
from yardstick.sources.packed import PackedSource

ROOT = Path(__file__).parents[2]
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
    assert torch.equal(moved.scales, weight.scales) and moved.bias.dtype == torch.float64
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
    write_rtn_checkpoint(original, folder / "rtn", 32)
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


@torch.no_grad()
def test_a_checkpoint_of_another_architecture_is_refused_and_changes_nothing(checkpoint, tmp_path):
    original, source = checkpoint
    family = "qwen2" if original.config.family != "qwen2" else "llama"
    other = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "m", family, False, layers=2))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(YardstickError, match="has no place in the model|of the model is not in it|, not \\["):
        load_packed(other, source.path)
    after = other.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@torch.no_grad()
def test_all_tensors_are_the_checkpoints(tmp_path):
    """Norms, embedding, biases and a head that stays in bf16 and was tied until now."""
    original = open_folder(write_tiny_model(tmp_path / "model", "qwen2", True, layers=2))
    write_rtn_checkpoint(original, tmp_path / "rtn", 32, keep_bf16="lm_head|q_proj")
    path = next((tmp_path / "rtn").glob("rest*.safetensors"))
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(1)
    tensors |= {name: t + torch.randn(t.shape, generator=generator).to(t) for name, t in tensors.items()}
    tensors["lm_head.weight"] = torch.randn(512, 96, generator=generator).bfloat16()
    with safe_open(path, "pt") as bundle:
        save_file(tensors, path, bundle.metadata())
    index = json.loads((tmp_path / "rtn" / INDEX).read_text())
    index["metadata"]["yardstick"]["sha256"] = {}
    index["weight_map"]["lm_head.weight"] = path.name
    (tmp_path / "rtn" / INDEX).write_text(json.dumps(index))
    model = AutoModelForCausalLM.from_pretrained(original.folder, dtype=torch.float32)
    names = load_packed(model, tmp_path / "rtn")
    assert "lm_head" not in names and not any("q_proj" in name for name in names)
    state = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor.float()), name
    assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    source = PackedSource(tmp_path / "rtn")
    ids = torch.randint(0, 500, (1, 9))
    states = final_hidden_states(source, original.config, ids, torch.float32, 1)
    assert (model(ids).logits - states @ tensors["lm_head.weight"].float().T).abs().max() < 1e-3


def test_a_layer_is_saved_and_loaded_whole():
    """What was made of the old matrix before the load is not used after it."""
    first, second = packed(70, 200, 32), packed(70, 200, 32)
    bias = torch.randn(70, device=pick_device())
    old, new = QuantLinear(first, bias.clone()), QuantLinear(second, bias + 1)
    x = torch.randn(3, 200, device=pick_device())
    expected = new(x)
    assert not torch.allclose(old(x), expected)
    assert set(old.state_dict()) == {"codes", "scales", "minima", "bias"} and not list(old.parameters())
    old.load_state_dict(new.state_dict(), strict=True)
    assert torch.equal(old(x), expected)
    copied, assigned = copy.deepcopy(new), QuantLinear(packed(70, 200, 32), bias + 1)
    assigned(x)
    assigned.codes, assigned.scales, assigned.minima = second.codes, second.scales, second.minima
    assert torch.equal(copied(x), expected) and torch.equal(assigned(x), expected)
    with pytest.raises(RuntimeError, match="size mismatch for scales"):
        old.load_state_dict(QuantLinear(packed(70, 200, 64), bias).state_dict())
    assert torch.equal(new.half().scales, second.scales) and new.bias.dtype == torch.float16  # scales keep their type


def test_inputs_that_do_not_fit_are_refused():
    weight = packed(70, 200, 32)
    device = pick_device()
    layer = QuantLinear(weight, torch.randn(70, device=device))
    for wrong in (
        torch.randn(3, 199, device=device),
        torch.randn(0, 7, device=device),
        torch.tensor(1.0, device=device),
        torch.ones(2, 200, dtype=torch.int64, device=device),
        torch.ones(2, 200, dtype=torch.bool, device=device),
    ):
        with pytest.raises(YardstickError, match="a packed matrix"):
            layer(wrong)
    assert layer(torch.randn(2, 0, 200, device=device)).shape == (2, 0, 70)
    assert layer(torch.randn(200, device=device).bfloat16()).dtype == torch.bfloat16  # whatever the bias is
    for name in paths_here(weight):
        path = open_path(name, weight, torch.float32)
        for wrong in (torch.randn(2, 201, device=device), torch.randn(0, 200, device=device), torch.randn(200)):
            with pytest.raises(YardstickError, match=f"path {name} takes 1|path {name} takes 2"):
                path(wrong)
    if "torch-int4" in paths_here(weight):
        with pytest.raises(YardstickError, match="path torch-int4 takes inputs of .* not of torch.float64"):
            open_path("torch-int4", weight, torch.float64)
    with pytest.raises(YardstickError, match="no path 'nope'"):
        QuantLinear(weight, path="nope")
    for rows, dtype in ((0, torch.float32), (1, "bfloat16"), (1, torch.int8)):
        with pytest.raises(YardstickError, match="one row or more of floating-point"):
            list(explain(torch.nn.ModuleList([layer]), rows, dtype))


@torch.enable_grad()
def test_a_gradient_is_right_or_refused():
    weight = packed(70, 200, 32)
    for name in paths_here(weight):
        x = torch.randn(2 if 2 in PATHS[name].rows else 1, 200, device=pick_device(), requires_grad=True)
        layer = QuantLinear(weight, path=name)
        if PATHS[name].has_gradient:
            layer(x).sum().backward()
            assert torch.allclose(x.grad, weight.dequantize().sum(0).expand_as(x), atol=1e-4)
        else:
            with pytest.raises(YardstickError, match=f"path {name} has no gradient"):
                layer(x)
            with torch.no_grad():
                layer(x)


def test_what_is_no_model_or_recipe_is_refused():
    class Doubled(torch.nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    def model():
        return torch.nn.Sequential(torch.nn.Linear(96, 50), torch.nn.Linear(50, 40))

    with pytest.raises(YardstickError, match="give the module that holds it"):
        quantize_model(torch.nn.Linear(96, 50), {"group_size": 32})
    with pytest.raises(YardstickError, match="0 is a Doubled, whose forward may do more"):
        quantize_model(torch.nn.Sequential(Doubled(96, 50)), {"group_size": 32})
    for recipe in ({"group_size": 0}, {"group_size": True}, {"group_size": 32.0}, {"group_size": 32, "mse": "y"}, None):
        with pytest.raises(YardstickError, match="quantize_model: the recipe is a group_size"):
            quantize_model(model(), recipe)
    with pytest.raises(YardstickError, match="is not a regular expression"):
        quantize_model(model(), {"group_size": 32}, skip="(")
    with pytest.raises(YardstickError, match="no path 'nope'"):
        quantize_model(wrong := model(), {"group_size": 32}, path="nope")
    assert all(type(layer) is torch.nn.Linear for layer in wrong)
    shared = torch.nn.Linear(50, 50)
    twice = torch.nn.ModuleDict({"a": shared, "b": torch.nn.Sequential(shared), "c": torch.nn.Linear(50, 9)})
    assert quantize_model(twice, {"group_size": 32}, skip="^c") == ["a", "b.0"]
    assert twice["a"] is twice["b"][0] and isinstance(twice["a"], QuantLinear)


def test_only_what_is_packed_together_is_one_product():
    config = read_config(ROOT / "config/architectures/smollm2-135m.json")
    joined = engine_shapes(config, lambda name: 128)
    assert joined["self_attn.q_proj+self_attn.k_proj+self_attn.v_proj"] == (960, 576, 128) and "lm_head" in joined
    apart = engine_shapes(config, lambda name: None if "q_proj" in name or "lm_head" in name else 64)
    assert not any("q_proj" in name for name in apart) and "lm_head" not in apart
    assert apart["self_attn.k_proj"] == (192, 576, 64) and "mlp.gate_proj+mlp.up_proj" in apart
    mixed = engine_shapes(config, lambda name: 32 if "up_proj" in name else 64)
    assert mixed["mlp.up_proj"][2] == 32 and mixed["mlp.gate_proj"][2] == 64
