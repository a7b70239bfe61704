"""The mini experiment end to end: what comes out, what reruns, what a killed run leaves."""

import copy
import json
import os
import re
import signal
import subprocess
import time

import pandas as pd
import pytest
import yaml

from tests.workflow.conftest import make_tree
from yardstick.files import sha256_file

OURS = {"rtn-g32", "gptq-g32", "noise-hf", "noise-arithmetic", "noise-decode"}
ALL = OURS | {"gguf-q8_0", "gguf-iq4_xs"}
INDEX = "results/quality/tiny/gptq-g32/checkpoint/model.safetensors.index.json"
TABLES = {"Writing results/quality/table.md", "Writing results/quality/quantization.md"}
TABLES |= {"Plotting tiny", "Plotting hybrid"}


def summary(tree, candidate, model="tiny"):
    return json.loads((tree.folder / f"results/quality/{model}/{candidate}/summary.json").read_text())


def rerun(candidate, models=("tiny", "hybrid")):
    """Messages of all that a changed variant makes again."""
    steps = ("Quantizing {model} as {name}", "Measuring {name} of {model}", "Summarizing {name} of {model}")
    return {step.format(model=model, name=candidate) for step in steps for model in models} | TABLES


def test_every_row_is_there_with_its_proof(finished_tree):
    table = (finished_tree.folder / "results/quality/table.md").read_text()
    record = (finished_tree.folder / "results/quality/quantization.md").read_text()
    for candidate in ALL:
        assert candidate in table and candidate in record
        found = summary(finished_tree, candidate)
        assert found["model"] == "tiny" and found["candidate"] == candidate and found["failed"] is None
        assert set(found["bits_per_weight"]) >= {"body", "head", "all"}
        assert set(found["kl"]) >= {"mean", "median", "p90", "p95", "p99", "p999", "max"}
        assert set(found["ppl"]) >= {"reference", "candidate"}
        assert set(found["corpora"]) == {"math", "more", "own"}
        assert found["positions"] == 5 * 64
        proof = found["provenance"]
        assert len(proof["recipe_sha256"]) == len(proof["code_sha256"]) == 64
        assert set(proof["inputs"]) >= {"model", "chunks", "reference"}
        positions = pd.read_parquet(finished_tree.folder / f"results/quality/tiny/{candidate}/positions.parquet")
        assert len(positions) == 7 * 64  # what the model itself wrote is in no figure over all
        others = positions[positions["corpus"] != "own"]
        assert len(others) == 320 and others["kl"].mean() == pytest.approx(found["kl"]["mean"])
        ruler = found["corpora"]["own"]["ruler"]
        assert ruler["z"] is None or abs(ruler["z"]) < 4


def test_the_numbers_are_in_the_order_that_they_must_be(finished_tree):
    kl = {candidate: summary(finished_tree, candidate)["kl"]["mean"] for candidate in ALL}
    assert abs(kl["noise-hf"]) < 1e-8
    assert abs(kl["noise-decode"]) < 1e-6
    assert kl["noise-hf"] < kl["noise-arithmetic"] < kl["gguf-q8_0"] < kl["gptq-g32"] < kl["rtn-g32"]
    # 96 columns are three whole groups of 32, 160 are five: 4 + 32 / 32 bits
    assert summary(finished_tree, "rtn-g32")["bits_per_weight"]["all"] == 5.0
    record = json.loads((finished_tree.folder / "results/quality/tiny/gptq-g32/quantize.json").read_text())
    assert len(record["matrices"]) == 2 * 7 + 1
    assert record["not_below_rtn"] == []
    assert all(m["output_error"] < 0.9 * m["output_error_rtn"] for m in record["matrices"])


def test_a_hybrid_model_has_its_own_section(finished_tree):
    kl = {name: summary(finished_tree, name, "hybrid")["kl"]["mean"] for name in OURS}
    assert abs(kl["noise-hf"]) < 1e-8 and abs(kl["noise-decode"]) < 1e-6
    assert kl["noise-arithmetic"] < kl["gptq-g32"] < kl["rtn-g32"]
    assert summary(finished_tree, "rtn-g32", "hybrid")["schemes"] == {"int4-g32": 3 * 6 + 7 + 1}
    record = json.loads((finished_tree.folder / "results/quality/hybrid/gptq-g32/quantize.json").read_text())
    assert len(record["matrices"]) == 3 * 6 + 7 + 1 and record["not_below_rtn"] == []
    table = (finished_tree.folder / "results/quality/table.md").read_text()
    section = table[table.index("## hybrid") :]
    assert "`gguf-" not in section.split("\n\n")[2]
    assert "The bar, `gguf-iq4_xs`, is not in this table: it is not made for this model." in section


def test_a_rival_of_another_model_is_no_target(finished_tree):
    result = finished_tree.run("-n", "results/quality/hybrid/gguf-q8_0/summary.json")
    assert result.returncode == 1
    assert "the config has no candidate gguf-q8_0 for the model hybrid (known: gptq-g32, rtn-g32" in result.stderr


def test_error_by_position_is_in_the_summary(finished_tree):
    buckets = summary(finished_tree, "rtn-g32")["by_position"]
    assert [(b["from"], b["to"], b["positions"]) for b in buckets] == [(0, 64, 320)]


def test_a_finished_tree_has_nothing_to_do(finished_tree):
    assert "Nothing to be done" in finished_tree.must_run("-n").stdout


def test_the_report_is_made(tree):
    tree.must_run("--report", "report.zip")
    assert (tree.folder / "report.zip").stat().st_size > 10_000


def test_a_changed_setting_reruns_its_variant_and_the_tables(tree):
    tree.config["variants"]["rtn-g32"]["mse"] = True
    tree.write_config()
    assert tree.planned() == rerun("rtn-g32")


def test_edited_gptq_reruns_gptq_and_not_rtn(tree):
    path = tree.folder / "src/yardstick/quantize/gptq.py"
    path.write_text(path.read_text() + "\n# an edit\n")
    assert tree.planned() == rerun("gptq-g32")


def test_a_new_variant_is_four_lines_of_config_and_one_target(tree):
    tree.config["variants"]["rtn-kept"] = {"method": "rtn", "group_size": 64, "keep_bf16": "down_proj|lm_head"}
    tree.write_config()
    tree.must_run("results/quality/tiny/rtn-kept/summary.json")
    bits = summary(tree, "rtn-kept")["bits_per_weight"]
    assert bits["head"] == 16.0 and 4.5 < bits["body"] < 16.0
    assert summary(tree, "rtn-kept")["schemes"] == {"bf16": 3, "int4-g64": 12}
    kept = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)] + ["model.embed_tokens.weight"]
    assert summary(tree, "rtn-kept")["unquantized"] == kept


def kill_group(tree, seconds):
    """Start the whole run in a group of its own and kill all of it after some time; False if it had finished."""
    process = subprocess.Popen(
        tree.command(),
        cwd=tree.folder,
        env=tree.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def test_killed_at_any_moment_it_ends_in_the_same_table(tmp_path, tiny_model, finished_tree):
    tree = make_tree(tmp_path, tiny_model)
    kills = sum(kill_group(tree, seconds) for seconds in (4.0, 7.5, 9.5, 12.0, 6.2, 14.1))
    assert kills >= 4
    tree.must_run()
    table = "results/quality/table.md"
    expected = {name: data for name, data in finished_tree.results().items() if "/tiny/" in name}
    found = tree.results()
    section = found.pop(table).decode().partition("## tiny")[2]
    assert found == expected and len(expected) > 15
    assert section.strip() and section in finished_tree.results()[table].decode()
    assert not list((tree.folder / "results").rglob(".tmp-*")) and not list((tree.folder / "data").rglob(".tmp-*"))


def test_gptq_resumes_at_the_layer_where_it_was_killed(tree, finished_tree):
    folder = tree.folder / "results/quality/tiny/gptq-g32/checkpoint"
    for name in ("model.safetensors.index.json", "rest.safetensors", "layer-00001.safetensors"):
        (folder / name).unlink()
    first = (folder / "layer-00000.safetensors").stat().st_mtime_ns
    tree.must_run(INDEX)
    assert (folder / "layer-00000.safetensors").stat().st_mtime_ns == first
    assert tree.results() == finished_tree.results()


def test_two_live_runs_exclude_each_other(tree):
    (tree.folder / INDEX).unlink()
    process = subprocess.Popen(
        tree.command(INDEX), cwd=tree.folder, env=tree.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        # Snakemake locks its inputs, then its outputs: stopped between the two (or before the names are in the
        # file), it has excluded nobody yet
        locks, deadline = tree.folder / ".snakemake/locks", time.monotonic() + 30
        while not any(path.stat().st_size for path in locks.glob("*.output.lock")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)  # else it may be done before the second has begun
        second = tree.run(INDEX)
        assert second.returncode == 1 and "lock" in second.stderr.lower()
    finally:
        process.send_signal(signal.SIGCONT)
        assert process.wait(300) == 0


def test_a_config_file_of_ones_own_replaces_the_default(tree):
    other = copy.deepcopy(tree.config)
    other["models"] = {"other": other["models"]["tiny"]}
    for rival in other["rivals"].values():
        del rival["models"]
    (tree.folder / "mine.yaml").write_text(yaml.safe_dump(other))
    planned = set(
        re.findall(
            r"^Job \d+: (.*)$",
            tree.must_run("-n", "--configfile=mine.yaml", "results/quality/table.md").stdout,
            flags=re.M,
        )
    )
    assert "Measuring rtn-g32 of other" in planned
    assert not [message for message in planned if "tiny" in message]


def test_a_distilled_variant_begins_with_anothers_checkpoint(tree):
    tree.config["variants"]["kd"] = {"method": "distill", "start": "rtn-g32", "steps": 4, "batch_tokens": 256}
    tree.config["variants"]["kd"] |= {"rate": 0.003, "score_every": 2}
    tree.write_config()
    tree.must_run("results/quality/tiny/kd/summary.json")
    folder = tree.folder / "results/quality/tiny/kd"
    record = json.loads((folder / "quantize.json").read_text())
    curve = record["distillation"]["curve"]
    assert [point["step"] for point in curve] == [0, 2, 4]
    assert record["inputs"]["starts"] == [sha256_file(tree.folder / INDEX.replace("gptq-g32", "rtn-g32"))]
    assert min(point["held_out"] for point in curve) < curve[0]["held_out"]
    assert summary(tree, "kd")["schemes"] == summary(tree, "rtn-g32")["schemes"]
    assert summary(tree, "kd")["kl"]["mean"] < summary(tree, "rtn-g32")["kl"]["mean"]
    assert not {"teacher.safetensors", "training.safetensors"} & {
        path.name for path in (folder / "checkpoint").iterdir()
    }
    # and a mix of several, of which one has two terms
    tree.config["variants"]["fine"] = {"method": "rtn", "group_size": 32, "terms": 2}
    tree.config["variants"]["mixed"] = {"method": "mix", "of": ["kd", "fine"], "bits": 7, "positions": 128}
    tree.write_config()
    tree.must_run("results/quality/tiny/mixed/summary.json")
    mixed = summary(tree, "mixed")
    assert set(mixed["schemes"]) >= {"int4-g32", "2xint4-g32"} and 5 < mixed["bits_per_weight"]["all"] <= 7
    assert mixed["kl"]["mean"] < summary(tree, "kd")["kl"]["mean"]
    tree.config["variants"]["rtn-g32"]["mse"] = True
    tree.write_config()
    assert "Quantizing tiny as kd" in tree.planned()
