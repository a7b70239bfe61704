"""The error of each matrix against full tensors and Hugging Face's own modules, with planted smoothing undone."""

import json
import math
import shutil
from argparse import Namespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny_model
from yardstick.cli import build_probe_inputs, probe
from yardstick.errors import YardstickError
from yardstick.evaluate.probe import ProbedMatrix, matrix_errors, probe_matrices, summarize_probe
from yardstick.evaluate.probe_inputs import HEAD, first_positions, stage_inputs
from yardstick.files import read_json
from yardstick.manifest import write_manifest
from yardstick.models.folder import open_folder
from yardstick.sources.hf import HuggingFaceSource

LLAMA = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
HYBRID = {"num_attention_heads": 4, "num_key_value_heads": 2, "layers": 4}
COUNTS = [7, 19, 4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("probe")
    return {
        "llama": write_tiny_model(root / "llama", "llama", tied=False, **LLAMA),
        "tied": write_tiny_model(root / "tied", "llama", tied=True, **LLAMA),
        "qwen2": write_tiny_model(root / "qwen2", "qwen2", tied=False),
        "qwen3_5": write_tiny_model(root / "qwen3_5", "qwen3_5", tied=False, **HYBRID),
    }


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 512, (3, 24), generator=torch.Generator().manual_seed(3))


def collected(original, ids, **settings):
    """Inputs of every matrix by its full name."""
    stages = stage_inputs(original.source, original.config, ids, COUNTS, torch.float32, 2, **settings)
    return {name: inputs for names, inputs in stages for name in names}


def hooked(folder, ids):
    """The same from Hugging Face's modules, which run the whole windows."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def keep(module, arguments, name=name):
                rows = zip(arguments[0], COUNTS, strict=True)
                found[f"{name}.weight"] = torch.cat([row[:count] for row, count in rows])

            module.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(ids)
    return found


def tensors_of(original):
    return {name: original.source.get(name).float() for name in original.source.infos()}


def saved(folder, original, tensors):
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    shutil.copy(original.folder / "config.json", folder)
    return HuggingFaceSource(folder)


def rounded(weights):
    """Round to nearest, 15 levels a row."""
    step = weights.abs().amax(1, keepdim=True) / 7
    return (weights / step).round() * step


def matrices_of(config):
    return [*config.body_matrices(), config.head_name]


def quantized(tensors, config):
    return tensors | {name: rounded(tensors[name]) for name in matrices_of(config)}


def direct(own, base, inputs):
    """Both errors from full tensors in fp64."""
    own, base, inputs = own.double(), base.double(), inputs.double()
    wrong, right = own @ inputs.T - base @ inputs.T, base @ inputs.T
    return float(wrong.norm() / right.norm()), float((own - base).norm() / base.norm())


def probed(source, original, inputs):
    matrices = probe_matrices(source, original.source, original.config, inputs, inputs.__getitem__)
    return {matrix.name: matrix for matrix in matrices}


def test_both_errors_by_hand():
    base = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    own, inputs = base.clone(), torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    own[0, 1] = 1.0
    # outputs (6, 4, 0) and (0, 4, 0), differences (1, 0, 0) in both
    output, weight = matrix_errors(base, own, inputs)
    assert output == pytest.approx(math.sqrt(2 / 68)) and weight == pytest.approx(1 / 5)
    # columns that smoothing multiplied by 1 and 4: [3, 0.25] is left in the first row, 1 in the second
    output, weight = matrix_errors(base, own, inputs, torch.tensor([1.0, 4.0]))
    assert weight == pytest.approx(math.sqrt(0.25**2 + 3**2) / 5)
    assert output == pytest.approx(math.sqrt(2 * (0.25**2 + 3**2) / 68))
    assert matrix_errors(base, base.clone(), inputs) == (0.0, 0.0)


def test_a_matrix_of_many_rows_is_one_matrix():
    base, inputs = torch.randn(9001, 7), torch.randn(11, 7)
    own = base + 0.1 * torch.randn(9001, 7)
    assert matrix_errors(base, own, inputs) == pytest.approx(direct(own, base, inputs), rel=1e-6)


def test_nothing_is_relative_to_zero():
    zero, inputs = torch.zeros(5, 3), torch.randn(4, 3)
    assert matrix_errors(zero, zero, inputs) == (0.0, 0.0)
    assert all(math.isnan(error) for error in matrix_errors(zero, torch.ones(5, 3), inputs))


def test_every_corpus_gives_the_same_number_of_positions():
    corpora = ["prose"] * 3 + ["code"] + ["math"] * 2
    assert first_positions(corpora, 10, 24) == [(0, 8), (3, 8), (4, 8)]
    assert first_positions(corpora, 10, 25) == [(0, 9), (3, 9), (4, 9)]
    # 15 of each: prose and math go on in their second window, code has no more than 10
    assert first_positions(corpora, 10, 45) == [(0, 10), (1, 5), (3, 10), (4, 10), (5, 5)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_5"])
def test_inputs_are_those_of_hugging_faces_modules(folders, ids, family):
    original = open_folder(folders[family])
    found, expected = collected(original, ids), hooked(folders[family], ids)
    assert set(found) == {*original.config.body_matrices(), HEAD}
    for name, inputs in found.items():
        assert len(inputs) == sum(COUNTS)
        torch.testing.assert_close(inputs, expected[name], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_the_first_stage_needs_no_forward_pass(folders, ids, family):
    original = open_folder(folders[family])
    found, everything = collected(original, ids, first=True), collected(original, ids)
    mixer = {"llama": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]}.get(
        family, ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"]
    )
    assert list(found) == [original.config.layer_name(0, f"{matrix}.weight") for matrix in mixer]
    assert all(torch.equal(inputs, everything[name]) for name, inputs in found.items())
    source = saved(
        folders[family].parent / f"first-{family}", original, quantized(tensors_of(original), original.config)
    )
    assert list(probed(source, original, found)) == list(found)


@pytest.mark.parametrize("family", ["llama", "tied", "qwen2", "qwen3_5"])
def test_errors_are_those_of_full_tensors(folders, ids, family):
    original = open_folder(folders[family])
    config, base, inputs = original.config, tensors_of(original), collected(original, ids)
    own = quantized(base, config)
    found = probed(saved(folders[family].parent / f"rtn-{family}", original, own), original, inputs)
    assert list(found) == matrices_of(config)
    for name, matrix in found.items():
        x = inputs[HEAD if name == config.head_name else name]
        assert (matrix.output_error, matrix.weight_error) == pytest.approx(direct(own[name], base[name], x), rel=1e-5)
        assert 0.01 < matrix.output_error < 0.5 and matrix.smoothing == () and matrix.fault is None
        # where nothing is undone, not a bit may change
        assert (matrix.output_error, matrix.weight_error) == matrix_errors(base[name], own[name], x)
    assert found[config.head_name].kind == "lm_head" and found[config.head_name].layer is None
    assert {m.kind for m in found.values() if m.layer == 0} == set(config.layer_linears(0))
    same = probed(saved(folders[family].parent / f"same-{family}", original, base), original, inputs)
    assert {(matrix.output_error, matrix.weight_error) for matrix in same.values()} == {(0.0, 0.0)}


def test_a_head_of_its_own_is_held_against_the_tied_one(folders, ids):
    original = open_folder(folders["tied"])
    base, inputs = tensors_of(original), collected(original, ids)
    table = base[original.config.embedding_name]
    source = saved(folders["tied"].parent / "untied", original, base | {HEAD: rounded(table)})
    found = probed(source, original, inputs)
    expected = direct(rounded(table), table, inputs[HEAD])
    assert (found[HEAD].output_error, found[HEAD].weight_error) == pytest.approx(expected, rel=1e-5)
    assert sum(matrix.output_error for name, matrix in found.items() if name != HEAD) == 0


def smooth(tensors, config, draw):
    """The model with factors of `draw(n)` moved wherever they can be, and what became of each matrix: W' = r W c.

    Value heads are repeated by hand: query head h reads value head h // (heads / key heads).
    """
    tensors, rows, columns = dict(tensors), {}, {}

    def scale(name, row=None, column=None):
        if row is not None:
            rows[name] = row
            tensors[name] = tensors[name] * row[:, None]
        if column is not None:
            columns[name] = column
            tensors[name] = tensors[name] * column

    def norm(name, readers, zero_centred=config.zero_centred_norm, repeat=1):
        factors = draw(len(tensors[name]))
        gain = (1 + tensors[name] if zero_centred else tensors[name]) / factors
        tensors[name] = gain - 1 if zero_centred else gain
        for reader in readers:
            scale(reader, column=torch.cat([factors] * repeat))

    for layer in range(config.num_layers):

        def full(name, layer=layer):
            return config.layer_name(layer, f"{name}.weight")

        if config.layer_kind(layer) == "linear_attention":
            norm(full("input_layernorm"), [full(f"linear_attn.in_proj_{part}") for part in ("qkv", "z", "a", "b")])
            norm(full("linear_attn.norm"), [full("linear_attn.out_proj")], False, config.delta.value_heads)
        else:
            norm(full("input_layernorm"), [full(f"self_attn.{part}_proj") for part in "qkv"])
            factors = draw(config.num_kv_heads * config.head_dim)
            scale(full("self_attn.v_proj"), row=1 / factors)
            shared = config.num_heads // config.num_kv_heads
            heads = [factors[config.head_dim * (h // shared) :][: config.head_dim] for h in range(config.num_heads)]
            scale(full("self_attn.o_proj"), column=torch.cat(heads))
        norm(full("post_attention_layernorm"), [full("mlp.gate_proj"), full("mlp.up_proj")])
        factors = draw(config.intermediate_size)
        scale(full("mlp.up_proj"), row=1 / factors)
        scale(full("mlp.down_proj"), column=factors)
    norm(config.final_norm_name, [HEAD])
    return tensors, rows, columns


def powers(count):
    return 2.0 ** torch.randint(-3, 3, (count,)).float()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_smoothing_changes_no_output_and_is_undone_to_the_last_bit(folders, ids, family):
    """Factors that are powers of two cost no rounding, but for the 1 of a zero-centred gain."""
    original = open_folder(folders[family])
    inputs, base = collected(original, ids), tensors_of(original)
    own, rows, columns = smooth(base, original.config, powers)
    folder = folders[family].parent / f"powers-{family}"
    source = saved(folder, original, own)
    reference = hooked(folders[family], ids)[HEAD]
    theirs = hooked(folder, ids)[HEAD] * (columns[HEAD])  # the planted model is the same function
    torch.testing.assert_close(theirs, reference, rtol=1e-3, atol=1e-3)
    found = probed(source, original, inputs)
    assert {m.kind: m.smoothing for m in found.values() if m.layer in (None, original.config.num_layers - 1)} == {
        "self_attn.q_proj": ("norm",),
        "self_attn.k_proj": ("norm",),
        "self_attn.v_proj": ("norm", "fitted"),
        "self_attn.o_proj": ("fitted",),
        "mlp.gate_proj": ("norm",),
        "mlp.up_proj": ("norm", "fitted"),
        "mlp.down_proj": ("fitted",),
        "lm_head": ("norm",),
    }
    most = 1e-6 if original.config.zero_centred_norm else 0.0
    assert all(m.output_error <= most and m.weight_error <= most for m in found.values())
    raw = {name: matrix_errors(base[name], own[name], inputs[name])[0] for name in inputs}
    assert min(raw.values()) > 0.3
    if family == "qwen3_5":
        assert {m.kind: m.smoothing for m in found.values() if m.layer == 0 and m.kind.startswith("linear")} == {
            f"linear_attn.{name}": ("norm",) for name in ("in_proj_qkv", "in_proj_z", "out_proj")
        }


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_rounded_smoothed_model_has_the_errors_of_its_rounding(folders, ids, family):
    original = open_folder(folders[family])
    config, inputs, base = original.config, collected(original, ids), tensors_of(original)
    own, rows, columns = smooth(base, config, lambda count: 3.0 ** (2 * torch.rand(count) - 1))
    own = quantized(own, config)
    found = probed(saved(folders[family].parent / f"awq-{family}", original, own), original, inputs)
    for name, matrix in found.items():
        one = torch.ones(1)
        undone = own[name] / columns.get(name, one) / rows.get(name, one)[:, None]
        known = direct(undone, base[name], inputs[name])
        assert 0.03 < known[0] < 0.5
        # factors of a norm are known; fitted ones are the planted ones up to the rounding of a row
        near = 0.03 if "fitted" in matrix.smoothing else 2e-5
        assert (matrix.output_error, matrix.weight_error) == pytest.approx(known, rel=near)
    up = config.layer_name(1, "mlp.up_proj.weight")
    plain = own[up] / columns[up]
    fits = [torch.linalg.lstsq(b[:, None].double(), w.double()).solution for b, w in zip(base[up], plain, strict=True)]
    fitted = torch.cat(fits).float()
    expected = direct(plain / fitted[:, None], base[up], inputs[up])
    assert (found[up].output_error, found[up].weight_error) == pytest.approx(expected, rel=1e-4)
    down = config.layer_name(1, "mlp.down_proj.weight")
    expected = direct(own[down] * fitted, base[down], inputs[down])
    assert (found[down].output_error, found[down].weight_error) == pytest.approx(expected, rel=1e-4)


def test_faults_name_the_matrix(folders, ids):
    original = open_folder(folders["llama"])
    inputs, base = collected(original, ids), tensors_of(original)
    norm, down = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight"
    own = {name: tensor.clone() for name, tensor in base.items()}
    own[norm][5], own[down][3, 2] = 0.0, 3e38
    found = probed(saved(folders["llama"].parent / "odd", original, own), original, inputs)
    faults = [matrix.fault for matrix in found.values() if matrix.fault]
    assert faults[0].startswith(f"{down}: its error is not a number (output inf")
    assert [fault.split(": ")[0] for fault in faults[1:]] == [
        f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"
    ]
    assert all("the norm before it has a zero where the original's has none" in fault for fault in faults[1:])
    own = base | {down: base[down].index_fill(0, torch.tensor([3]), torch.nan)}
    with pytest.raises(YardstickError, match=f"tensor {down} is not finite at \\[3, 0\\]"):
        probed(saved(folders["llama"].parent / "nan", original, own), original, inputs)


def test_a_channel_that_is_silent_in_both_norms_stays_out_of_it(folders, ids, tmp_path):
    """AWQ leaves a zero gain zero; the input of that channel is zero too."""
    norm, query = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    original = open_folder(folders["llama"])
    base = tensors_of(original)
    base[norm][5] = 0.0
    saved(tmp_path / "base", original, base)
    original = open_folder(tmp_path / "base")
    inputs = collected(original, ids, first=True)
    own = smooth(base, original.config, powers)[0]
    found = probed(saved(tmp_path / "own", original, own), original, inputs)
    assert found[query].output_error == 0 and found[query].smoothing == ("norm",)


def test_the_steps_write_whole_records(folders, tmp_path):
    """From windows to probe.json: shares of the corpora, proofs, a failed candidate, a file of another model."""
    original = open_folder(folders["llama"])
    base = tensors_of(original)
    for name, folder in (("m", folders["llama"]), ("other", folders["tied"])):
        names = ["config.json", "model.safetensors"]
        write_manifest(tmp_path / name / "manifest.json", folder, names)
    generator = np.random.default_rng(0)
    windows = {name: generator.integers(0, 512, (2, 12), dtype=np.int32) for name in ("prose", "code")}
    np.savez(tmp_path / "chunks.npz", **windows)
    huge = base["model.layers.0.mlp.down_proj.weight"].index_fill(0, torch.tensor([3]), 3e38)
    for name, own in (
        ("good", quantized(base, original.config)),
        ("bad", base | {"model.layers.0.mlp.down_proj.weight": huge}),
    ):
        saved(tmp_path / name, original, own)
        write_manifest(tmp_path / name / "manifest.json", tmp_path / name, ["config.json", "model.safetensors"])

    def step(module, recipe, **arguments):
        arguments = {key: value if key == "name" else tmp_path / value for key, value in arguments.items()}
        module.main(Namespace(recipe=recipe, **arguments))

    inputs = {"positions": 25, "layers": "all", "dtype": "float32", "batch_chunks": 2, "own_texts": []}
    step(build_probe_inputs, inputs, model="m/manifest.json", chunks="chunks.npz", output="reference/x.json")
    files = {"inputs": "reference/x.json", "model": "m/manifest.json", "output": "probe.json"}
    recipe = {"model": "m", "candidate": {"kind": "local"}, "source": "hf"}
    step(probe, recipe, name="good", checkpoint="good/manifest.json", **files)
    found = read_json(tmp_path / "probe.json")
    assert found["failed"] is None and found["positions"] == {"prose": 13, "code": 13}
    assert len(found["matrices"]) == found["all"]["matrices"] == 2 * 7 + 1
    ids = torch.from_numpy(np.concatenate(list(windows.values())))[:, :-1].long()
    x = {}
    for names, taken in stage_inputs(original.source, original.config, ids, [11, 2, 11, 2], torch.float32, 4):
        x |= dict.fromkeys(names, taken)
    for matrix in found["matrices"]:
        name = matrix["name"]
        expected = direct(rounded(base[name]), base[name], x[name])
        assert (matrix["output_error"], matrix["weight_error"]) == pytest.approx(expected, rel=1e-4)
        assert (matrix["scheme"], matrix["bits"], matrix["smoothing"]) == ("f32", 32.0, None)
    worst = max(found["matrices"], key=lambda matrix: matrix["output_error"])
    assert found["all"]["worst"] == worst["name"]
    assert set(found["provenance"]["inputs"]) == {"model", "probe", "checkpoint"}

    step(probe, recipe, name="bad", checkpoint="bad/manifest.json", **files)
    found = read_json(tmp_path / "probe.json")
    assert found["failed"].startswith("model.layers.0.mlp.down_proj.weight: its error is not a number")
    assert "all" not in found and [m["name"] for m in found["matrices"] if m["output_error"] is None] == [
        "model.layers.0.mlp.down_proj.weight"
    ]
    with pytest.raises(YardstickError, match="reference/x.json: was made of another model than"):
        step(probe, recipe, name="good", checkpoint="good/manifest.json", **files | {"model": "other/manifest.json"})


def test_medians_by_hand():
    errors = {"a": (0.1, 0.2), "b": (0.4, 0.1), "c": (0.3, 0.8), "d": (0.25, 0.5)}
    matrices = [ProbedMatrix(n, 0, "q" if n < "c" else n, *pair) for n, pair in errors.items()]
    found = summarize_probe(matrices)
    assert found["all"] == {
        "matrices": 4,
        "output_error": {"median": pytest.approx(0.275), "max": 0.4},
        "weight_error": {"median": pytest.approx(0.35), "max": 0.8},
        "worst": "b",
    }
    assert list(found["kinds"]) == ["q", "c", "d"]
    assert found["kinds"]["q"]["output_error"] == {"median": pytest.approx(0.25), "max": 0.4}
    assert json.dumps(found)
