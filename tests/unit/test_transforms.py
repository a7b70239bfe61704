"""Transforms leave the function alone: transformed logits are the original's, and what is stored says so by itself."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny_model
from yardstick.engine.model import load_packed
from yardstick.files import read_json, sha256_file, write_json
from yardstick.models.config import load_config
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states, head_rows
from yardstick.quantize.checkpoint import INDEX, PackedWriter
from yardstick.quantize.gptq import gptq, output_error
from yardstick.quantize.grid import Grid, find_range, nearest_codes, round_to_nearest
from yardstick.quantize.methods import modules_of, needs_text
from yardstick.quantize.pack import dequantize
from yardstick.quantize.scales import clipped_ranges, descend, find_scales, remaining_variance
from yardstick.quantize.transforms import awq
from yardstick.quantize.transforms.awq import ScaledSource, channels_of_columns, divided_gain
from yardstick.quantize.transforms.folded import untied
from yardstick.quantize.transforms.hadamard import Rotation, hadamard
from yardstick.quantize.transforms.rotate import RotatedSource
from yardstick.sources.base import TensorSource, audit_source
from yardstick.sources.hf import HuggingFaceSource
from yardstick.sources.packed import PackedSource

MODELS = {
    "llama": ("llama", True, {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-untied": ("llama", False, {"hidden_size": 60, "num_key_value_heads": 3}),
    "qwen2": ("qwen2", True, {}),
    "qwen3": ("qwen3", False, {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen3_5": ("qwen3_5", True, {"layers": 4}),
}


class Fp32Source(HuggingFaceSource):
    """The stored values in fp32, so that a transform rounds nothing."""

    def read(self, name):
        return super().read(name).float()

    def rows(self, name):
        return self.get(name)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    family, tied, changes = MODELS[request.param]
    torch.manual_seed(1)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", family, tied, seed=3, **changes)


def logits(source: TensorSource, config) -> torch.Tensor:
    input_ids = torch.randint(0, 512, (3, 77), generator=torch.Generator().manual_seed(5))
    return final_hidden_states(source, config, input_ids, torch.float32, 2) @ head_rows(source, config)[:].float().T


def random_scales(config) -> dict[str, torch.Tensor]:
    """Factors from 0.1 to 10 wherever some can go; every gated norm and every value head has its own."""
    names = {config.final_norm_name: config.hidden_size}
    for layer in range(config.num_layers):
        for origin in {awq.ORIGIN[f"{name}"] for name in config.layer_linears(layer) if name in awq.ORIGIN}:
            channels = int(channels_of_columns(origin, config).max()) + 1
            names[config.layer_name(layer, origin)] = channels
    return {name: 10 ** (2 * torch.rand(channels) - 1) for name, channels in names.items()}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def test_rotated_scaled_and_both_compute_what_the_original_does(model):
    config, source = load_config(model), Fp32Source(model)
    expected = logits(source, config)
    free, scales = untied(config), random_scales(config)
    rotated = RotatedSource(source, config, 4, True)
    for changed in (
        rotated,
        RotatedSource(source, config, 4, False),
        ScaledSource(source, config, scales),
        ScaledSource(rotated, free, scales),
    ):
        audit_source(changed, free.tensors())
        assert close(logits(changed, free), expected) < 2e-5
    for name, shape in free.tensors().items():  # every matrix is another one, and rows are those of the whole
        assert rotated.get(name).shape == shape
        if len(shape) == 2 and "in_proj_" not in name:
            base = source.get(config.head_name if name == "lm_head.weight" else name)
            assert close(rotated.get(name), base) > 0.5
    torch.testing.assert_close(rotated.rows("lm_head.weight")[7:9], rotated.get("lm_head.weight")[7:9])
    torch.testing.assert_close(rotated.rows(config.embedding_name)[7:9], rotated.get(config.embedding_name)[7:9])


def test_gains_become_neutral_and_norms_inside_heads_stay(model):
    config, source = load_config(model), Fp32Source(model)
    rotated = RotatedSource(source, config, 4, True)
    neutral = 0.0 if config.zero_centred_norm else 1.0
    for name in source.infos():
        if name.endswith("layernorm.weight") or name == config.final_norm_name:
            assert bool((rotated.get(name) == neutral).all()) and not bool((source.get(name) == neutral).all())
        elif name.endswith(("q_norm.weight", "k_norm.weight", "linear_attn.norm.weight", "q_proj.bias")):
            assert torch.equal(rotated.get(name), source.get(name))


def test_transformers_computes_the_same_from_the_transformed_tensors(model):
    """In place of the original's own, in a model whose head is untied."""
    config, source = load_config(model), Fp32Source(model)
    changed = ScaledSource(RotatedSource(source, config, 4, True), untied(config), random_scales(config))
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    input_ids = torch.randint(0, 512, (2, 40))
    expected = theirs(input_ids).logits
    theirs.lm_head.weight = torch.nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
    parameters = dict(theirs.named_parameters())
    assert set(parameters) == set(changed.infos())
    for name, parameter in parameters.items():
        parameter.data = changed.get(name)
    assert close(theirs(input_ids).logits, expected) < 2e-5


@pytest.mark.parametrize("order", [2, 12, 20, 28, 36, 64, 96, 576, 1152])
def test_hadamard_matrices_are(order):
    matrix = hadamard(order)
    assert set(matrix.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


def test_orders_without_a_construction_have_none():
    assert [n for n in range(1, 45) if hadamard(n) is not None] == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44]
    assert hadamard(92) is None  # there is one, but of another construction


@pytest.mark.parametrize("width", [64, 96, 576, 92, 30])
def test_rotations_are_orthogonal_and_flat(width):
    rotation, other = Rotation(width, 3), Rotation(width, 4)
    matrix = rotation.of_columns(torch.eye(width))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width), atol=1e-5, rtol=0)
    assert not torch.equal(matrix, other.of_columns(torch.eye(width)))
    if hadamard(width) is not None:
        torch.testing.assert_close(matrix.abs(), torch.full((width, width), width**-0.5))
    weights = torch.randn(3 * width, 5)
    torch.testing.assert_close(
        rotation.of_rows(weights), torch.block_diag(matrix, matrix, matrix).T @ weights, atol=1e-4, rtol=0
    )


def test_a_gain_is_divided_in_its_own_type_and_the_columns_get_the_rest():
    gain = torch.tensor([1.0, 0.5, 0.0, 3.0], dtype=torch.bfloat16)
    stored, factors = divided_gain(gain, torch.tensor([3.0, 2.0, 5.0, 1e-3]), False)
    assert stored.dtype == torch.bfloat16 and stored[2] == 0
    assert stored[0] == torch.tensor(1 / 3).bfloat16() and float(factors[0]) != 3.0  # 1 / 3 is not exact in bf16
    torch.testing.assert_close(stored.float() * factors, gain.float(), rtol=1e-6, atol=0)
    assert factors.tolist()[1:3] == [2.0, 1.0]
    centred, factors = divided_gain(gain - 1, torch.tensor([3.0, 2.0, 5.0, 1e-3]), True)
    torch.testing.assert_close((1 + centred.float()) * factors, gain.float(), rtol=1e-6, atol=1e-6)


def outliers(features: int = 160) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs with a few loud channels, their second moments and mean magnitudes."""
    inputs = torch.randn(900, features)
    inputs[:, 5::31] *= 30
    return inputs, inputs.T @ inputs / len(inputs), inputs.abs().mean(0)


@pytest.mark.parametrize("feedback", [None, 0.01])
def test_factors_lower_the_output_error_of_rounding(feedback):
    inputs, hessian, magnitude = outliers()
    weights, grid = torch.randn(48, 160), Grid(64)
    scales = find_scales([weights[:16], weights[16:]], hessian, magnitude, torch.arange(160), grid, 10, feedback, "w")
    assert float(scales.log().mean()) == pytest.approx(0, abs=1e-5)
    assert float(scales[5::31].min()) > float(scales.median())  # loud channels get finer steps

    def error(factors):
        restored = dequantize(*round_to_nearest(weights * factors, grid), 64) / factors
        return float(((restored - weights) @ inputs.T).square().sum())

    assert error(scales) < 0.7 * error(torch.ones(160))


def test_the_descent_lowers_what_gptq_leaves():
    """Its own measure, spelled out, and GPTQ's output error, which it stands for."""
    inputs, hessian, _ = outliers()
    weights = torch.randn(24, 160) * (1 + 3 * torch.rand(160))
    left, rows = remaining_variance(hessian, 0.01, "w"), torch.rand(24) + 0.5

    def measure(factors):
        total = 0.0
        for row in range(24):
            for columns in (slice(0, 64), slice(64, 128), slice(128, 160)):
                scaled = weights[row, columns] * factors[columns]
                size = float(scaled.max() - scaled.min())
                total += float(rows[row]) * size**2 * float((left[columns] / factors[columns].square()).sum())
        return total

    def error(factors):
        moved = hessian / factors / factors[:, None]
        result = gptq(weights * factors, moved, Grid(64), True, 0.01, "w")
        return output_error(weights, dequantize(result.codes, result.scales, result.minima, 64) / factors, hessian)

    one = torch.ones(160)
    scales = descend(weights, rows, left, one, torch.arange(160), 64)
    assert measure(scales) < 0.9 * measure(one)
    assert error(scales) < 0.9 * error(one)


def test_columns_of_one_channel_share_a_factor():
    _, hessian, magnitude = outliers()
    channel_of = torch.arange(40).repeat_interleave(2).repeat(2)
    scales = find_scales([torch.randn(48, 160)], hessian, magnitude, channel_of, Grid(64), 4, None, "w")
    assert scales.shape == (40,)


def test_remaining_variance_is_that_given_the_columns_rounded_later():
    """The definition: Schur complements, in the order of the walk."""
    mixing = torch.randn(40, 40)
    hessian = mixing @ mixing.T
    damped = hessian.double() + 0.01 * hessian.diagonal().mean().double() * torch.eye(40, dtype=torch.float64)
    order = torch.argsort(hessian.diagonal(), descending=True).tolist()
    expected = torch.empty(40, dtype=torch.float64)
    for done, column in enumerate(order):
        rest = order[done + 1 :]
        left, beside = damped[rest][:, rest], damped[rest, column]
        expected[column] = damped[column, column] - (beside @ torch.linalg.solve(left, beside) if rest else 0)
    torch.testing.assert_close(remaining_variance(hessian, 0.01, "w").double(), expected, rtol=1e-3, atol=0)


def test_clipped_ranges_are_the_best_of_each_group_alone():
    _, hessian, _ = outliers(100)
    weights, grid = torch.randn(6, 100) ** 3, Grid(64)
    scales, minima = clipped_ranges(weights, hessian, grid)
    for row in range(6):
        for group, columns in enumerate((slice(0, 64), slice(64, 100))):
            found = []
            for factor in torch.linspace(1, 0.5, 21):
                scale, minimum = find_range(weights[row, columns] * factor)
                error = nearest_codes(weights[row, columns], scale, minimum) * scale + minimum - weights[row, columns]
                found.append((float(error @ hessian[columns, columns] @ error), float(scale), float(minimum)))
            best = min(found)
            assert float(scales[row, group]) == pytest.approx(best[1], rel=0.02)
            error = nearest_codes(weights[row, columns], scales[row, group], minima[row, group])
            error = error * scales[row, group] + minima[row, group] - weights[row, columns]
            assert float(error @ hessian[columns, columns] @ error) == pytest.approx(best[0], rel=1e-4)
    assert bool((scales[:, 0] < find_range(weights[:, :64])[0]).any())


def test_what_a_recipe_is_made_by():
    plain, both = {"method": "rtn"}, {"method": "gptq", "transform": {"awq": {}, "rotate": {}}}
    stem = "yardstick.quantize."
    assert modules_of(plain) == [stem + "run_rtn"] and not needs_text(plain)
    assert modules_of(both) == [stem + "run_gptq", stem + "transforms.rotate", stem + "transforms.awq"]
    assert not needs_text(plain | {"transform": {"rotate": {}}}) and needs_text(plain | {"transform": {"awq": {}}})


RECIPES = {
    "rotated": {"method": "rtn", "mse": False, "transform": {"rotate": {"seed": 2, "heads": True}}},
    "rotated-head-kept": {
        "method": "rtn",
        "mse": False,
        "keep_bf16": "lm_head|v_proj",
        "transform": {"rotate": {"seed": 2, "heads": False}},
    },
    "both": {
        "method": "gptq",
        "mse": False,
        "act_order": True,
        "damping": 0.01,
        "keep_bf16": "up_proj",
        "transform": {"awq": {"steps": 3}, "rotate": {"seed": 0, "heads": True}},
    },
    "awq": {"method": "awq", "steps": 3, "clip": True},
    "refined": {
        "method": "gptq-refined",
        "damping": 0.03,
        "rounds": 1,
        "drift": True,
        "residual": True,
        "transform": {"rotate": {"seed": 2, "heads": False}},
    },
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """A tiny model with its manifest, and calibration sequences."""
    folder = tmp_path_factory.mktemp("experiment")
    write_tiny_model(folder / "model", "llama", True, num_attention_heads=6, num_key_value_heads=2)
    files = {path.name: sha256_file(path) for path in (folder / "model").iterdir()}
    write_json(folder / "manifest.json", {"folder": "model", "files": files})
    np.savez(folder / "calib.npz", text=np.random.default_rng(0).integers(0, 512, (9, 48)))
    return folder


def quantize(experiment: Path, name: str | dict, output: Path, starts: Sequence[Path] = ()) -> Path:
    recipe = {"group_size": 32, "keep_bf16": None} | (RECIPES[name] if isinstance(name, str) else name)
    command = [sys.executable, "-m", "yardstick.cli.quantize", "--recipe", json.dumps(recipe)]
    command += ["--model", str(experiment / "manifest.json"), "--output", str(output / INDEX)]
    command += ["--record", str(output / "quantize.json")]
    command += ["--calibration", str(experiment / "calib.npz")] if needs_text(recipe) else []
    command += [word for start in starts for word in ("--start", str(start / INDEX))]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return output


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in folder.glob("*.safetensors*")}


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_has_all_that_it_needs_and_a_stopped_run_ends_in_the_same_bytes(name, experiment, tmp_path):
    """Norms, embedding and head are its own: it is read without the original, and is the model up to rounding."""
    folder = quantize(experiment, name, tmp_path / "whole")
    original, packed = open_folder(experiment / "model"), PackedSource(folder)
    config = untied(original.config)
    audit_source(packed, config.tensors())
    expected, found = logits(original.source, original.config), logits(packed, config)
    assert 0.01 < close(found, expected) < 0.6
    keep = RECIPES[name].get("keep_bf16")
    assert ("lm_head.weight" in packed.schemes) == (not (keep and "lm_head" in keep))
    assert not list(folder.glob("scales*"))  # what the search found is in the tensors now
    theirs = AutoModelForCausalLM.from_pretrained(experiment / "model", dtype=torch.float32)
    load_packed(theirs, packed)
    input_ids = torch.randint(0, 512, (3, 77), generator=torch.Generator().manual_seed(5))
    assert close(theirs(input_ids).logits.detach(), found) < 1e-4

    (tmp_path / "again").mkdir()
    first = "layer-00000.safetensors"
    (tmp_path / "again" / first).write_bytes((folder / first).read_bytes())
    assert digests(quantize(experiment, name, tmp_path / "again")) == digests(folder)
    assert read_json(folder / "config.json")["tie_word_embeddings"] is False


def test_rotated_variants_are_mixed(experiment, tmp_path):
    """Through the command: the losses of single matrices are those in the rotated original."""
    fine = quantize(experiment, RECIPES["rotated"] | {"group_size": 16}, tmp_path / "fine")
    coarse = quantize(experiment, "rotated", tmp_path / "coarse")
    recipe = {"method": "mix", "of": ["coarse", "fine"], "bits": 5.5, "positions": 96, "held_out": 0.25}
    recipe["transform"] = RECIPES["rotated"]["transform"]
    folder = quantize(experiment, recipe, tmp_path / "mixed", [coarse, fine])
    facts, mixed = read_json(folder / "quantize.json")["mix"], PackedSource(folder)
    assert set(facts["tried"]) == {"mix", "coarse"} and facts["tried"]["mix"]["bits"] <= 5.5
    assert {entry["variant"] for entry in facts["matrices"].values()} == {"coarse", "fine"}
    assert all(0 < loss < 1 for entry in facts["matrices"].values() for loss in entry["losses"].values())
    original = open_folder(experiment / "model")
    audit_source(mixed, untied(original.config).tensors())
    assert read_json(folder / "config.json")["tie_word_embeddings"] is False
    expected = logits(original.source, original.config)
    errors = [close(logits(PackedSource(path), untied(original.config)), expected) for path in (fine, folder, coarse)]
    assert errors[0] < errors[1] < errors[2]


def test_a_stopped_search_goes_on(experiment, tmp_path):
    original = open_folder(experiment / "model")
    recipe, arguments = {"group_size": 32}, (original.source, original.config, {"steps": 2})
    whole = PackedWriter(tmp_path / "whole", "digest")
    awq.transform(*arguments, recipe, whole, experiment / "calib.npz")
    again = PackedWriter(tmp_path / "again", "digest")
    (tmp_path / "again" / "scales-00001.safetensors").write_bytes(
        (tmp_path / "whole" / "scales-00001.safetensors").read_bytes()
    )
    awq.transform(*arguments, recipe, again, experiment / "calib.npz")
    assert digests(tmp_path / "again") == digests(tmp_path / "whole") and len(digests(tmp_path / "whole")) == 3
