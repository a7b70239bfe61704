import json
import re

import pytest

from tests.unit.test_report import write_candidate
from yardstick.cli import model_card
from yardstick.cli.common import parser
from yardstick.errors import YardstickError
from yardstick.files import canonical_json, sha256_file, sha256_text, write_json
from yardstick.report.model_card import write_card

RECORD = {
    "recipe": {"method": "rtn", "group_size": 128, "keep_bf16": "down|lm_head", "mse": False},
    "inputs": {"model": "1" * 64},
    "code_sha256": "2" * 64,
    "versions": {"torch": "x"},
    "matrices": [],
    "not_below_rtn": [],
}


def change(path, **values):
    write_json(path, json.loads(path.read_text()) | values)


@pytest.fixture
def results(tmp_path):
    """A candidate that was measured, with the index of its checkpoint."""
    write_candidate(tmp_path, "good", 0.02)
    folder = tmp_path / "m" / "good"
    index = folder / "checkpoint" / "model.safetensors.index.json"
    write_json(index, {"metadata": {"yardstick": {"sha256": {"rest.safetensors": "3" * 64}}}})
    write_json(folder / "quantize.json", RECORD)
    summary = json.loads((folder / "summary.json").read_text())
    summary["recipe"]["candidate"] = RECORD["recipe"]
    summary["provenance"]["inputs"]["checkpoint"] = sha256_file(index)
    write_json(folder / "summary.json", summary)
    return tmp_path


def test_every_number_is_one_of_the_files(results):
    card = write_card(results, "m", "good")
    summary = json.loads((results / "m" / "good" / "summary.json").read_text())
    # chunks 0 to 3 have a KL of 0.02 * (1 + chunk / 10); prose is the first two, code the others
    low, high = summary["kl"]["interval"]
    assert f"| all | 400 | 0.0230 | [{low:.4f}, {high:.4f}] | 0.0260 | 0.0260 | 1.0000 |" in card
    assert "| prose | 200 | 0.0210 |" in card and "| code | 200 | 0.0250 |" in card
    assert "| 2.718 | 2.718 | 1.0000 |" in card  # every NLL is 1
    assert "| 4.250 | 4.250 | 4.250 | 0.0 |" in card
    assert "made here by rounding to nearest. Stored as: int4-g128 (7 matrices)." in card
    assert "| `keep_bf16` | down\\|lm_head |" in card and "| `group_size` | 128 |" in card
    assert "- 400 positions (code 200, prose 200)" in card
    assert "- yardstick forward in float32, logits in float32; device cpu, c, s" in card
    assert "- metric version 1" in card and "Made and measured with torch x." in card
    recipe = sha256_text(canonical_json(RECORD["recipe"]))
    checkpoint = summary["provenance"]["inputs"]["checkpoint"]
    for digest in (recipe, "a" * 64, "b" * 64, "2" * 64, "c" * 64, "1" * 64, checkpoint):
        assert f"| `{digest}` |" in card
    assert f"| `rest.safetensors` | `{'3' * 64}` |" in card
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", card, flags=re.M)]
    for lines in tables:
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_what_a_calibration_came_to(results):
    change(results / "m" / "good" / "quantize.json", matrices=[{}, {}, {}], not_below_rtn=["x"])
    assert "output error is below round-to-nearest's for 2 of 3 matrices" in write_card(results, "m", "good")


def test_a_failed_candidate_has_a_card_without_figures(results):
    fault = "KL is NaN, first at corpus code chunk 2 position 7"
    path = results / "m" / "good" / "summary.json"
    summary = json.loads(path.read_text())
    for key in ("kl", "ppl", "top1", "top1_interval", "delta_p", "corpora", "positions", "confidence", "by_position"):
        del summary[key]
    write_json(path, summary | {"failed": fault})
    card = write_card(results, "m", "good")
    assert f"**The measurement failed**: {fault}. There are no figures." in card
    assert "KL mean" not in card and "4.250" in card and "rest.safetensors" in card


def test_files_of_a_rival_are_those_of_its_manifest(results):
    folder = results / "m" / "good"
    (folder / "checkpoint" / "model.safetensors.index.json").unlink()
    manifest = folder / "checkpoint" / "manifest.json"
    write_json(manifest, {"folder": "files", "files": {"model.gguf": "4" * 64}})
    recipe = {"kind": "hub", "format": "gguf", "files": ["*.gguf"]}
    change(folder / "quantize.json", recipe=recipe, inputs={"model.gguf": "4" * 64}, versions={})
    summary = json.loads((folder / "summary.json").read_text())
    summary["recipe"]["candidate"] = recipe
    summary["provenance"]["inputs"]["checkpoint"] = sha256_file(manifest)
    write_json(folder / "summary.json", summary)
    card = write_card(results, "m", "good")
    assert "published by others and fetched from the hub" in card and card.count("4" * 64) == 1
    assert '| `files` | ["*.gguf"] |' in card
    assert "Made with none on record.\n\nMeasured with torch x." in card


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("quantize.json", {"recipe": {"method": "gptq"}}, "summary.json is of another recipe than quantize.json"),
        ("summary.json", {"kl": {"mean": 1}}, "summary.json or quantize.json is damaged .*interval"),
        ("checkpoint/model.safetensors.index.json", {"x": 1}, "is not the checkpoint that summary.json was measured"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(results, name, values, message):
    change(results / "m" / "good" / name, **values)
    with pytest.raises(YardstickError, match=message) as error:
        write_card(results, "m", "good")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["summary.json", "quantize.json"])
def test_a_file_that_is_missing_is_named(results, name):
    (results / "m" / "good" / name).unlink()
    with pytest.raises(YardstickError, match=f"good/{name}: no such file"):
        write_card(results, "m", "good")


def test_the_command_writes_the_card(results):
    arguments = parser("")
    for name in ("results", "model", "candidate", "output"):
        arguments.add_argument(f"--{name}")
    given = ["--results", str(results), "--model", "m", "--candidate", "good", "--output", str(results / "card.md")]
    model_card.main(arguments.parse_args(given))
    assert (results / "card.md").read_text() == write_card(results, "m", "good")
