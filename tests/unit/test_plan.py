"""The plan's bytes against real files and against the recorded figures of the 27B experiment."""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.tiny import write_tiny_model
from yardstick.cli import plan as command
from yardstick.errors import YardstickError
from yardstick.evaluate.probe_inputs import stage_inputs
from yardstick.load_experiment import load_experiment
from yardstick.models.config import read_config
from yardstick.models.folder import open_folder
from yardstick.plan.sizes import matrices, parameters
from yardstick.plan.steps import ModelPlan, Rates, missing_bytes
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.run_rtn import quantize_model
from yardstick.quantize.transforms.rotate import transform
from yardstick.rivals.export_folder import export_folder
from yardstick.rivals.gguf_write import write_gguf
from yardstick.sources.packed import PackedSource

RATES = Rates({"float32": 50e12, "bfloat16": 600e12}, 1e9, 50e6)


def plan_of(name, model=None):
    experiment = load_experiment(yaml.safe_load(Path(f"config/{name}.yaml").read_text()))
    return ModelPlan(experiment, model or next(iter(experiment.models)), RATES)


def test_the_27b_model_has_the_recorded_shapes():
    config = read_config(Path("config/architectures/qwen3.8-27b.json"))
    assert len(matrices(config)) == 401
    kinds = [config.layer_kind(layer) for layer in range(64)]
    assert kinds.count("linear_attention") == 48 and kinds.count("full_attention") == 16
    assert len(config.tensors()) == 851  # of the language model; the published index also lists vision and prediction
    assert parameters(config) == 26_895_998_464


def test_the_27b_plan_agrees_with_the_recorded_figures():
    plan = plan_of("qwen3.8-27b")
    assert plan.chunks * plan.length == 81_920
    assert round(plan.states / 1e9, 2) == 0.84
    sizes = {weights.name: weights for weights in plan.weights()}
    for name, bits in (("rtn-g128", 4.25), ("gptq-g128-mse", 4.25), ("gptq-g64", 4.5)):
        assert sizes[name].bits == bits
    # the recorded weight bytes are all parameters, embedding included, at the stated bits ...
    for bits, recorded, ceiling in ((4.0, 13.45, 126), (4.25, 14.29, 119), (4.5, 15.13, 112), (5.0, 16.81, 101)):
        assert round(parameters(plan.config) * bits / 8e9, 2) == recorded
        assert round(1701 / recorded) == ceiling
    # ... which nothing stores or reads: a token reads the 401 matrices, the small bf16 tensors and one embedding row
    assert sizes["gptq-g128"].per_token == pytest.approx(13.65e9, rel=1e-3)
    assert sizes["gptq-g128"].stored == pytest.approx(16.19e9, rel=1e-3)
    assert 1701e9 / sizes["gptq-g128"].per_token == pytest.approx(124.6, abs=0.05)
    # one layer at a time: the original needs a tenth of its 55.6 GB
    steps = {step.name: step for step in plan.steps()}
    assert steps["run the original"].memory < 6e9 and steps["measure gptq-g128"].memory < 6e9
    assert steps["fetch the model"].disk == 55_563_006_776


@pytest.mark.parametrize("tied", [True, False])
def test_planned_bytes_are_those_of_the_files(tmp_path, tied):
    """Odd widths, short last groups, GGUF's fallback types: the shapes tell the files' size, up to headers."""
    folder = write_tiny_model(tmp_path / "model", "llama", tied, hidden_size=288, intermediate_size=544)
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    config["models"] = {"m": {"kind": "local", "path": str(folder)}}
    config["rivals"]["exported-g32"] = {"kind": "exported", "variant": "rtn-g32"}
    kept = {"method": "rtn", "keep_bf16": "lm_head|down_proj"}
    config["variants"]["rtn-kept"] = kept
    config["variants"]["rtn-kept-rotated"] = kept | {"transform": {"rotate": {}}}  # whose head is no more the embedding
    experiment, original = load_experiment(config), open_folder(folder)
    plan = ModelPlan(experiment, "m", RATES)
    assert plan.model_bytes == sum(info.bits // 8 for info in original.source.infos().values())
    for name in ("rtn-g32", "rtn-g128", "rtn-kept", "rtn-kept-rotated"):
        writer, model = PackedWriter(tmp_path / name, "d"), (original.source, original.config)
        if name == "rtn-kept-rotated":
            model = transform(*model, {"seed": 0, "heads": False}, {}, writer, None)
        writer.finish(quantize_model(*model, experiment.recipe(name), writer, None), {}, folder)
        files = list((tmp_path / name).glob("*.safetensors"))
        headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)
        assert plan.candidate_size(name) == sum(path.stat().st_size for path in files) - headers
    exported = tmp_path / "exported"
    export_folder(PackedSource(tmp_path / "rtn-g32"), None, exported)
    files = list(exported.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)
    assert plan.candidate_size("exported-g32") == sum(path.stat().st_size for path in files) - headers
    for name in ("gguf-q4_k_m", "gguf-q8_0"):
        recipe = experiment.recipe(name)
        write_gguf(tmp_path / f"{name}.gguf", original, recipe["mix"], None, threads=1)
        size = (tmp_path / f"{name}.gguf").stat().st_size
        tokenizer = (folder / "tokenizer.json").stat().st_size
        # norms are fp32 in GGUF, and the header holds the tokenizer
        assert plan.candidate_size(name) < size < plan.candidate_size(name) + tokenizer + 30_000


@pytest.mark.parametrize("layers", ["all", "first"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_planned_bytes_of_the_probe_are_those_of_its_inputs(tmp_path, family, layers):
    folder = write_tiny_model(tmp_path / "model", family, tied=False, layers=4)
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    config |= {"models": {"m": {"kind": "local", "path": str(folder)}}, "probe": {"positions": 31, "layers": layers}}
    config["parts"] = {}
    del config["gsm8k"], config["corpora"]["evaluation"]["texts"]["own"]
    config["rivals"] = {"x": {"kind": "local", "format": "hf", "path": str(folder)}}
    config |= {"bar": "x", "evaluation": {"dtype": "bfloat16"}}
    plan, original = ModelPlan(load_experiment(config), "m", RATES), open_folder(folder)
    ids, counts = torch.arange(33).view(3, 11), [11, 11, 11]  # three corpora, a third of the positions each
    stages = list(stage_inputs(original.source, original.config, ids, counts, torch.bfloat16, 2, layers == "first"))
    steps = {step.name: step for step in plan.steps()}
    assert steps["probe inputs"].disk == sum(inputs.nbytes for _, inputs in stages)
    shapes = original.config.tensors()
    assert plan.probed()[2] == sum(math.prod(shapes[name]) for names, _ in stages for name in names)
    assert "probe rtn-g32" in steps and "probe noise-hf" not in steps


def test_what_is_there_already_needs_no_disk(tmp_path, monkeypatch):
    plan = plan_of("config")
    monkeypatch.chdir(tmp_path)  # where nothing is there
    before = missing_bytes(plan.steps())
    path = Path("results/quality/smollm2-135m/rtn-g32/checkpoint/x.safetensors")
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(1_000_000))
    assert before - missing_bytes(plan.steps()) == 1_000_000


def test_downloads_are_deleted_so_the_largest_counts(tmp_path, monkeypatch):
    plan = plan_of("qwen3.8-27b")
    monkeypatch.chdir(tmp_path)
    steps = plan.steps()
    sizes = {step.name: step.disk for step in steps}
    passing = {f"fetch {name}" for name in plan.experiment.rivals} | {"decode exl3-4.00bpw"}
    kept = sum(size for name, size in sizes.items() if name not in passing)
    assert missing_bytes(steps) == kept + sizes["fetch exl3-4.00bpw"] + sizes["decode exl3-4.00bpw"]


def run(capsys, *arguments) -> tuple[int, str, str]:
    """The command, in this process; exit code, output, errors."""
    monkeypatched = pytest.MonkeyPatch()
    monkeypatched.setattr("sys.argv", ["plan", *arguments])
    code = 0
    try:
        parser = command.parser("test")
        command.add_arguments(parser)
        command.run_step(command.main, parser)
    except SystemExit as stop:
        code = stop.code
    finally:
        monkeypatched.undo()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_every_step_and_refuses_a_disk_that_is_too_small(capsys, monkeypatch):
    arguments = ("--config", "config/qwen3.8-27b.yaml", "--gflops-float32", "50000", "--gflops-bfloat16", "600000")
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**12))
    code, out, err = run(capsys, *arguments)
    assert code == 0 and err == ""
    for line in ("fetch the model", "run the original", "quantize gptq-g64", "fetch nvfp4-qat", "measure noise-hf"):
        assert f"| {line} |" in out
    assert "free here: 1000.00 GB" in out
    assert "| decode exl3-4.00bpw |" in out and "Not counted: environments of exllamav3" in out
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**11))
    code, out, err = run(capsys, *arguments)
    assert code == 1 and "| run the original |" in out
    assert err.startswith("yardstick: plan: the experiment still needs 208.") and "has 100.00 GB free" in err


def test_wrong_input_of_the_plan(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- 1")
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    del config["models"]["smollm2-135m"]["architecture"]
    config["models"] = {"unseen": config["models"]["smollm2-135m"]}
    (tmp_path / "unknown.yaml").write_text(yaml.safe_dump(config))
    for name, message in (
        ("none.yaml", "cannot be read as YAML"),
        ("bad.yaml", "cannot be read as YAML"),
        ("list.yaml", "is not a YAML mapping"),
        ("unknown.yaml", "plan: the shapes of unseen are not known before it is here"),
    ):
        code, _, err = run(capsys, "--config", str(tmp_path / name), "--gflops-float32", "1", "--gflops-bfloat16", "1")
        assert code == 1 and err.startswith("yardstick: ") and message in err and len(err.splitlines()) == 1


def test_an_architecture_that_is_not_the_models_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "llama", True)
    config = copy.deepcopy(yaml.safe_load(Path("config/config.yaml").read_text()))
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(raw | {"num_hidden_layers": 7}))
    config["models"] = {"m": {"kind": "local", "path": str(folder), "architecture": str(tmp_path / "other.json")}}
    with pytest.raises(YardstickError, match="other.json is not the architecture of .*config.json"):
        ModelPlan(load_experiment(config), "m", RATES)


def test_rivals_that_the_plan_knows_cannot_be(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "qwen3_5", False, layers=4)
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    config["models"] = {"m": {"kind": "local", "path": str(folder)}}
    with pytest.raises(YardstickError, match="rival gguf-q8_0: a qwen3_5_text model cannot be written as GGUF yet"):
        ModelPlan(load_experiment(config), "m", RATES).steps()
    config["rivals"] = {"gone": {"kind": "local", "format": "hf", "path": str(tmp_path / "gone")}}
    config["bar"], config["parts"], config["gsm8k"]["candidates"] = "gone", {}, None
    with pytest.raises(YardstickError, match="rival gone: .*/gone: no such file or folder"):
        ModelPlan(load_experiment(config), "m", RATES).steps()
    config["models"]["m"]["path"] = "/nope"
    with pytest.raises(YardstickError, match="/nope/config.json: no such file; is models.m.path"):
        ModelPlan(load_experiment(config), "m", RATES)


def test_wrong_rates_are_one_line(capsys):
    for option in ("--disk-mb", "--bandwidth-gb", "--gflops-float32"):
        for value in ("0", "nan", "x", "-3"):
            code, _, err = run(capsys, option, value)
            assert code == 1 and err == f"yardstick: argument {option}: invalid positive value: '{value}'\n"


def test_the_measured_rate_is_a_rate():
    assert command.measured_rate(torch.float32, size=256, seconds=0.05) > 1e8


def test_parts_and_attributions_are_steps():
    plan = plan_of("config")
    steps = {step.name: step for step in plan.steps()}
    part, whole = steps["measure gguf-iq4_xs-our-head"], steps["measure gguf-iq4_xs"]
    assert (part.seconds, part.memory) == (whole.seconds, whole.memory)
    step = steps["attribute gptq-g128-mse"]
    # 30 layers of 7 matrices: 7 x 465 + 465 + 7 x 30 + 2 x 30 layers of 256 positions, at 7.08 million operations each
    # and attention; and the heads of 251 states, of which two are the reference's and the original's own
    operations = 3990 * 256 * (7.078e6 + 2 * 128 * 576) + 251 * 256 * 2 * 49152 * 576
    assert step.seconds == pytest.approx(4 + operations / (0.65 * 50e12), rel=0.02, abs=1)
    assert step.memory < 3e9
    del plan.experiment.config["attribution"]
    assert not [step.name for step in plan.steps() if step.name.startswith("attribute")]


def test_a_distilled_variant_is_planned():
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    config["variants"]["kd"] = {"method": "distill", "start": "gptq-g128-mse"}
    config["variants"]["kd-long"] = {"method": "distill", "start": "kd", "steps": 128}
    plan = ModelPlan(load_experiment(config), "smollm2-135m", RATES)
    steps = {step.name: step for step in plan.steps()}
    short, long = steps["quantize kd"], steps["quantize kd-long"]
    assert short.disk == long.disk == steps["quantize gptq-g128-mse"].disk and short.memory == long.memory
    # a step of 1024 tokens: 3 x 2 x 106 million weights of the body, 4 x 2 x 28 million of the head, attention, scores
    operations = (long.seconds - short.seconds) / 64 * 0.45 * 50e12
    assert 0.9e12 < operations < 1.05e12
    assert 1.5e9 < short.memory < 3.2e9


def test_a_mix_is_planned():
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    config["variants"]["mixed"] = {"method": "mix", "of": ["rtn-g128", "rtn-g64", "rtn-g32"], "bits": 4.5}
    plan = ModelPlan(load_experiment(config), "smollm2-135m", RATES)
    steps = {step.name: step for step in plan.steps()}
    assert steps["quantize mixed"].disk == pytest.approx(steps["quantize rtn-g64"].disk, rel=0.01)
    config["variants"]["kd"] = {"method": "distill", "start": "mixed"}
    started = {s.name: s for s in ModelPlan(load_experiment(config), "smollm2-135m", RATES).steps()}["quantize kd"]
    assert started.disk == steps["quantize mixed"].disk and started.memory > 1e9
    config["variants"]["mixed"]["positions"] = 1024
    more = {step.name: step for step in ModelPlan(load_experiment(config), "smollm2-135m", RATES).steps()}
    operations = (more["quantize mixed"].seconds - steps["quantize mixed"].seconds) * 0.65 * 50e12
    # of three variants, 210 matrices and the head alone, half of the layers each, and their heads
    assert operations == pytest.approx(3 * 512 * 211 * 2 * (106e6 / 2 + 49152 * 576), rel=0.2)


def test_a_search_of_scales_takes_time_of_its_own():
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    config["variants"]["gptq-awq"] = config["variants"]["gptq-g128"] | {"transform": {"awq": {}}}
    config["variants"]["awq"] = {"method": "awq"}
    steps = {step.name: step for step in ModelPlan(load_experiment(config), "smollm2-135m", RATES).steps()}
    assert steps["quantize gptq-awq"].seconds > steps["quantize gptq-g128"].seconds
    assert steps["quantize awq"].seconds == steps["quantize gptq-awq"].seconds  # as long as GPTQ, at most
    assert steps["quantize awq"].disk == steps["quantize rtn-g128"].disk
