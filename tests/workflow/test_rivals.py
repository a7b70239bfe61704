"""Rivals that others made: by a tool in its own environment, fetched, or lying on this machine."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hub import COMMIT, Hub, hub_environment
from tests.workflow.conftest import make_tree
from tests.workflow.test_bad_input import message
from yardstick.report.model_card import write_card

TOOL = '''"""A tool that copies; the standard library and nothing else."""
import shutil, sys

def main(recipe, model, calibration, output):
    if recipe["scheme"] == "broken":
        print("working ...")
        sys.exit("RuntimeError: this scheme needs more memory")
    if recipe["scheme"] == "nothing":
        return
    if recipe["scheme"] == "loud":
        raise ValueError("width 96 is not a multiple\\nof 128")
    assert (calibration is not None) == ("sequences" in recipe)
    if calibration:  # an .npy file: 4 sequences of 32 int64, after a header of 128 bytes
        assert len(calibration.read_bytes()) == 128 + 4 * 32 * 8
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(model / name, output / name)
'''
# stands for exllamav3: it knows the one matrix that the checkpoint of the test has
DECODER = '''"""Spells out a checkpoint whose decoded form lies beside it."""
import shutil

def main(recipe, model, calibration, output):
    shutil.copyfile(model.parent / "spelled-out.safetensors", output / "model.safetensors")
'''


@pytest.fixture
def rivals(tmp_path, tiny_model):
    """A tree with a tool of its own, and with rivals of all kinds."""
    (tmp_path / "tree").mkdir()
    tree = make_tree(tmp_path / "tree", tiny_model)
    folder = tree.folder / "workflow/envs/copier"
    folder.mkdir(parents=True)
    (folder / "make.py").write_text(TOOL)
    (folder / "requirements.txt").write_text("# nothing\n")
    theirs = tmp_path / "theirs"
    shutil.copytree(tiny_model, theirs)
    tensors = load_file(theirs / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = (tensor.float() * 16).round().div(16).bfloat16()
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    tree.config["variants"] = {"rtn-g32": {"method": "rtn", "group_size": 32}}
    tree.config["rivals"] = {
        "copied": {"kind": "made", "tool": "copier", "scheme": "plain", "format": "hf"},
        "seen": {"kind": "made", "tool": "copier", "scheme": "plain", "format": "hf", "sequences": 4},
        "broken": {"kind": "made", "tool": "copier", "scheme": "broken", "format": "hf"},
        "nothing": {"kind": "made", "tool": "copier", "scheme": "nothing", "format": "hf"},
        "theirs": {"kind": "local", "format": "hf", "path": str(theirs)},
        "gone": {"kind": "local", "format": "hf", "path": str(tmp_path / "nowhere")},
        "mixed-up": {"kind": "local", "format": "gguf", "path": str(theirs)},
        "unread": {"kind": "local", "format": "exl9", "path": str(theirs)},
        "loud": {"kind": "made", "tool": "copier", "scheme": "loud", "format": "hf"},
        "greedy": {"kind": "made", "tool": "copier", "scheme": "plain", "format": "hf", "sequences": 99},
        "exported": {"kind": "exported", "variant": "rtn-g32"},
    }
    tree.config["baseline"], tree.config["bar"] = "rtn-g32", "theirs"
    tree.write_config()
    return tree


def summary(tree, name):
    return json.loads((tree.folder / f"results/quality/tiny/{name}/summary.json").read_text())


def test_rivals_of_all_kinds(rivals):
    names = ("copied", "seen", "theirs")
    rivals.must_run(*(f"results/quality/tiny/{name}/summary.json" for name in names))
    for name in ("copied", "seen"):  # the tool changed nothing, and the ruler says so exactly
        assert summary(rivals, name)["kl"]["mean"] == 0.0 and summary(rivals, name)["top1"] == 1.0
        record = json.loads((rivals.folder / f"results/quality/tiny/{name}/quantize.json").read_text())
        assert record["recipe"]["tool"] == "copier" and "pip" in record["versions"]
        assert set(record["files"]) == {"config.json", "model.safetensors"}
    record = json.loads((rivals.folder / "results/quality/tiny/theirs/quantize.json").read_text())
    assert record["inputs"] == {"model": summary(rivals, "theirs")["provenance"]["inputs"]["model"]}
    assert "read on this machine" in write_card(rivals.folder / "results/quality", "tiny", "theirs")
    assert 0 < summary(rivals, "theirs")["kl"]["mean"] < 1 and summary(rivals, "theirs")["bits_per_weight"]["all"] == 16
    # another requirement makes the environment again, and what was made in it
    path = rivals.folder / "workflow/envs/copier/requirements.txt"
    path.write_text("# nothing at all\n")
    planned = rivals.must_run("-n", "results/quality/tiny/copied/summary.json").stdout
    assert "Installing the environment of copier" in planned and "Making the rival copied of tiny" in planned
    path.write_text("no-such-package-of-ours==1.0\n")
    line = message(rivals.run("results/quality/tiny/copied/summary.json"))
    assert "environment of workflow/envs/copier/requirements.txt: cannot be made (" in line


def test_tools_that_fail_are_one_line(rivals):
    line = message(rivals.run("results/quality/tiny/broken/summary.json"))
    assert line == "yardstick: rival broken: copier failed (RuntimeError: this scheme needs more memory)"
    assert not (rivals.folder / "results/quality/tiny/broken/checkpoint/files").exists()
    assert "rival nothing: copier wrote no weights" in message(rivals.run("results/quality/tiny/nothing/summary.json"))
    # the tool's own traceback is its own; our line takes the first line of its exception
    said = rivals.run("results/quality/tiny/loud/summary.json").stderr
    assert "yardstick: rival loud: copier failed (ValueError: width 96 is not a multiple)\n" in said
    line = message(rivals.run("results/quality/tiny/greedy/summary.json"))
    assert "rival greedy: asks for 99 calibration sequences, " in line and line.endswith("calib.npz holds 16")
    line = message(rivals.run("results/quality/tiny/unread/summary.json"))
    assert line.endswith("unread: there is no reader for the format exl9")
    line = message(rivals.run("results/quality/tiny/gone/summary.json"))
    assert "rival gone: " in line and "nowhere: no such file or folder" in line
    line = message(rivals.run("results/quality/tiny/mixed-up/summary.json"))
    assert "theirs: holds no .gguf file" in line


def test_a_rival_that_changed_since_it_was_fetched_is_not_measured(rivals):
    rivals.must_run("results/quality/tiny/copied/checkpoint/manifest.json")
    path = rivals.folder / "results/quality/tiny/copied/checkpoint/files/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.zeros_like(tensors["model.norm.weight"])
    save_file(tensors, path, metadata={"format": "pt"})
    line = message(rivals.run("results/quality/tiny/copied/summary.json"))
    assert "files/model.safetensors: is gone or has changed" in line


def test_a_rival_that_an_older_file_replaced_is_measured_again(rivals):
    """Copies that keep their times: Snakemake alone looks whether a file is newer."""
    row = "results/quality/tiny/theirs/summary.json"
    rivals.must_run(row)
    assert "Nothing to be done" in rivals.must_run("-n", row).stdout
    path = Path(rivals.config["rivals"]["theirs"]["path"]) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = 2 * tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, (1e9, 1e9))
    before = summary(rivals, "theirs")["kl"]["mean"]
    rivals.must_run(row)
    assert summary(rivals, "theirs")["kl"]["mean"] != before


def test_an_unknown_tool_is_refused_at_once(rivals):
    (rivals.folder / "workflow/envs/copier/requirements.txt").unlink()
    assert "there is no tool copier" in message(rivals.run("-n"))
    (rivals.folder / "workflow/envs/copier/requirements.txt").write_text("")
    rivals.config["rivals"]["copied"]["tool"] = "wizard"
    rivals.write_config()
    assert message(rivals.run("-n")) == (
        "yardstick: config: rivals.copied.tool: there is no tool wizard (known: autoround, bitsandbytes, copier, "
        "gptqmodel, hqq, llmcompressor)"
    )


def test_the_loss_of_integer_zero_points_is_a_row(rivals):
    rivals.must_run("results/quality/tiny/exported/summary.json", "results/quality/tiny/rtn-g32/summary.json")
    ours, theirs = summary(rivals, "rtn-g32"), summary(rivals, "exported")
    assert theirs["schemes"] == {"ct-int4-g32-asym": ours["schemes"]["int4-g32"]}
    assert ours["kl"]["mean"] < theirs["kl"]["mean"] < 3 * ours["kl"]["mean"]
    assert theirs["bits_per_weight"]["all"] < ours["bits_per_weight"]["all"]  # a zero point has 4 bits, a minimum 16
    record = json.loads((rivals.folder / "results/quality/tiny/exported/quantize.json").read_text())
    assert 0 < record["relative_error"] < 0.2 and len(record["tensors"]) == ours["schemes"]["int4-g32"]
    assert "exported here from a variant of ours" in write_card(rivals.folder / "results/quality", "tiny", "exported")


def hub_rivals(rivals, tmp_path, names, kind="hf"):
    """The tree with rivals on a hub that notes which downloads lie on the disk whenever weights are asked for."""
    results = rivals.folder / "results/quality/tiny"
    seen = []

    def note(name):
        if name.endswith(".safetensors"):
            seen.append(sorted(path.parts[-3] for path in results.glob("*/checkpoint/files")))

    folder = tmp_path / "theirs"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = Hub({name: files[name] for name in ("config.json", "model.safetensors")}, on_file=note)
    rivals.extra = hub_environment(hub, tmp_path / "home")
    entry = {"kind": "hub", "format": kind, "repository": "owner/model", "revision": COMMIT}
    for name in names:
        rivals.config["rivals"][name] = entry | {"files": ["*.safetensors", "config.json"]}
    rivals.write_config()
    return hub, seen


def test_downloads_are_measured_and_deleted_one_at_a_time(rivals, tmp_path):
    hub, seen = hub_rivals(rivals, tmp_path, ["first", "second", "third"])
    targets = [f"results/quality/tiny/{name}/summary.json" for name in ("first", "second", "third", "theirs")]
    rivals.must_run("--cores", "2", *targets)
    assert seen == [[], [], []]  # nothing else lay there when one was fetched
    results = rivals.folder / "results/quality/tiny"
    assert not list(results.glob("*/checkpoint/files")) and not list(rivals.folder.glob("data/downloads/**/*.safet*"))
    for name in ("first", "second", "third"):
        assert summary(rivals, name)["kl"] == summary(rivals, "theirs")["kl"]
        manifest = json.loads((results / name / "checkpoint/manifest.json").read_text())
        assert set(manifest["files"]) == {"config.json", "model.safetensors"}
    assert "published by others" in write_card(rivals.folder / "results/quality", "tiny", "first")
    # what was deleted is not missed, until the row has to be measured again
    asked = len(hub.asked)
    assert "Nothing to be done" in rivals.must_run("-n", *targets).stdout
    (results / "second/positions.parquet").unlink()
    rivals.must_run("results/quality/tiny/second/positions.parquet")
    assert len(hub.asked) == asked + 2
    rivals.must_run("--notemp", "-f", "results/quality/tiny/third/checkpoint/manifest.json")
    assert (results / "third/checkpoint/files/model.safetensors").is_file()


def test_a_format_that_only_its_tool_decodes(rivals, tmp_path):
    """The checkpoint of one trellis goes through the rules of EXL3; its bits are those that it stores."""
    tool = rivals.folder / "workflow/envs/exllamav3"
    planned = "results/quality/tiny/first/summary.json"
    theirs = tmp_path / "theirs"
    tensors = load_file(theirs / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    rows, columns = tensors[f"{name}.weight"].shape
    save_file(tensors, tmp_path / "theirs/../spelled-out.safetensors", metadata={"format": "pt"})
    del tensors[f"{name}.weight"]
    tensors[f"{name}.trellis"] = torch.ones(columns // 16, rows // 16, 16 * 4, dtype=torch.int16)
    tensors[f"{name}.suh"], tensors[f"{name}.svh"] = torch.ones(columns).half(), torch.ones(rows).half()
    tensors[f"{name}.mcg"] = torch.tensor(1, dtype=torch.int32)
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    hub_rivals(rivals, tmp_path, ["first"], kind="exl3")
    plan = rivals.must_run("-n", planned).stdout
    for step in (
        "Fetching the rival first",
        "Installing the environment of exllamav3",
        "Spelling out the weights of first",
    ):
        assert step in plan
    # the tool itself, without a GPU, is one line
    (tool / "requirements.txt").write_text("# nothing\n")
    (tool / "decode.py").write_text(DECODER)
    rivals.config["rivals"]["lying"] = {"kind": "local", "format": "exl3", "path": str(theirs)}
    rivals.write_config()
    rivals.must_run("results/quality/tiny/lying/summary.json")
    found = summary(rivals, "lying")
    assert found["schemes"]["exl3-4bit"] == 1 and found["schemes"]["bf16"] > 1
    stored = 4 * rows * columns + 16 * (rows + columns) + 32
    bits = json.loads((rivals.folder / "results/quality/tiny/lying/evaluation.json").read_text())["bits_per_weight"]
    assert bits["body"] < 16 and (16 - bits["body"]) * body_weights(tensors, rows * columns) == pytest.approx(
        16 * rows * columns - stored
    )
    assert not (rivals.folder / "results/quality/tiny/lying/decoded/files").exists()
    assert "read on this machine" in write_card(rivals.folder / "results/quality", "tiny", "lying")


def body_weights(tensors, more):
    """Weights of the matrices of all layers, with those of the one that is a trellis."""
    return more + sum(t.numel() for name, t in tensors.items() if "proj.weight" in name)
