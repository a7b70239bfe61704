"""Rivals that others made: by a tool in its own environment, fetched, or lying on this machine."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workflow.conftest import make_tree
from tests.workflow.test_bad_input import message
from yardstick.report.model_card import write_card

TOOL = '''"""A tool that rounds every matrix to halves; the standard library and nothing else."""
import argparse, json, pathlib, shutil, sys
parser = argparse.ArgumentParser()
for name in ("recipe", "model", "output", "calibration"):
    parser.add_argument("--" + name)
arguments = parser.parse_args()
recipe = json.loads(arguments.recipe)
if recipe["scheme"] == "broken":
    print("working ...")
    sys.exit("RuntimeError: this scheme needs more memory")
if recipe["scheme"] == "nothing":
    sys.exit(0)
assert (arguments.calibration is not None) == ("sequences" in recipe)
for name in ("config.json", "model.safetensors"):
    shutil.copyfile(pathlib.Path(arguments.model) / name, pathlib.Path(arguments.output) / name)
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
    assert "rival nothing: copier wrote no safetensors file" in message(
        rivals.run("results/quality/tiny/nothing/summary.json")
    )
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


def test_an_unknown_tool_is_refused_at_once(rivals):
    rivals.config["rivals"]["copied"]["tool"] = "wizard"
    rivals.write_config()
    assert message(rivals.run("-n")) == (
        "yardstick: config: rivals.copied.tool: there is no tool wizard (known: bitsandbytes, copier, llmcompressor)"
    )
