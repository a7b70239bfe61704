import json

import numpy as np
import pandas as pd
import pytest

from yardstick.errors import YardstickError
from yardstick.evaluate.positions import COLUMNS, write_positions
from yardstick.evaluate.statistics import summarize
from yardstick.files import write_json
from yardstick.report.ablation import ablation_sections
from yardstick.report.document import unquantized_lines, write_record
from yardstick.report.markdown import fidelity_table, figure, not_measured_line
from yardstick.report.plots import plot_kl_against_bits, plot_kl_tail
from yardstick.report.probe import probe_sections
from yardstick.report.recorded import recorded_section
from yardstick.report.results import best_line, load_results, verdict

RECIPE = {"models": {"m": ["good", "bad", "rival", "noise-hf"]}, "baseline": "good", "bar": "rival", "seed": 0}


EVALUATE = {"forward": "yardstick", "dtype": "float32", "source": "gguf"}


def write_candidate(folder, name, kl, failed=None, chunks=4):
    count = 400
    chunk = np.repeat(np.arange(chunks), count // chunks)
    rows = {name: np.ones(count) for name in COLUMNS} | {"chunk": chunk, "position": np.arange(count)}
    rows |= {"corpus": np.where(chunk < 2, "prose", "code"), "kl": kl * (1 + chunk / 10)}
    frame = pd.DataFrame(rows).astype(COLUMNS)
    write_positions(folder / "m" / name / "positions.parquet", frame)
    proof = {
        "recipe_sha256": "a" * 64,
        "code_sha256": "b" * 64,
        "inputs": {"model": "c" * 64, "chunks": "d" * 64, "reference": "e" * 64},
        "metric_version": 1,
        "versions": {"torch": "x"},
        "machine": {"cpu": "c", "system": "s"},
        "device": "cpu",
    }
    summary = {
        "candidate": name,
        "failed": failed,
        "bits_per_weight": {"body": 4.25, "head": 4.25, "all": 4.25, "file_bytes": 1000},
        "schemes": {"int4-g128": 7},
        "unquantized": [f"layers.{i}.weight" for i in range(8)] if name == "rival" else [],
        "recipe": {"candidate": {"method": "rtn"}, "evaluate": EVALUATE},
        "provenance": proof,
    }
    write_json(folder / "m" / name / "summary.json", summary if failed else summary | summarize(frame))


@pytest.fixture
def results(tmp_path):
    write_candidate(tmp_path, "good", 0.02)
    write_candidate(tmp_path, "bad", 0.3, failed="KL is NaN, first at corpus code chunk 2 position 7")
    write_candidate(tmp_path, "rival", 0.05)
    write_candidate(tmp_path, "noise-hf", 1e-9)
    return tmp_path


def test_rows_are_sorted_by_kl_and_failed_ones_come_last_without_figures(results):
    loaded = load_results(results, "m", RECIPE)
    assert [row.name for row in loaded.rows] == ["noise-hf", "good", "rival", "bad"]
    lines = fidelity_table(loaded).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "**failed** | KL is NaN, first at corpus code chunk 2 position 7" in lines[-1]
    assert "0.3" not in lines[-1]
    assert "`rival` (bar)" in lines[4] and "+0.0345" in lines[4]


def test_verdict_follows_the_numbers(results):
    loaded = load_results(results, "m", RECIPE)
    assert verdict(loaded).endswith("the bar is met.")
    turned = load_results(results, "m", RECIPE | {"baseline": "rival", "bar": "good"})
    assert "the bar is not met (2.50 times its KL)" in verdict(turned)
    exact = load_results(results, "m", RECIPE | {"bar": "noise-hf"})
    exact.row("noise-hf").summary["kl"]["mean"] = 0.0
    assert verdict(exact).endswith("the bar is not met.")
    broken = load_results(results, "m", RECIPE | {"bar": "bad"})
    assert "cannot be judged: bad failed" in verdict(broken)


def test_candidates_measured_on_other_positions_are_refused(results):
    write_candidate(results, "rival", 0.05, chunks=2)
    with pytest.raises(YardstickError, match="rival and good: the two candidates were measured on different positions"):
        load_results(results, "m", RECIPE)


def test_record_and_plots_hold_every_candidate(results):
    loaded = load_results(results, "m", RECIPE)
    entry = {"origin": "o", "licence": "l", "windows": [1, 2], "text_sha256": "f" * 64, "ids_sha256": "9" * 64}
    text = write_record([(loaded, {"evaluation": {"prose": entry}, "calibration": {}}, results, None, {})], results)
    for name in RECIPE["models"]["m"]:
        assert text.count(name) >= 2
    plot_kl_against_bits(loaded, results / "a.png")
    plot_kl_tail(loaded, results / "b.png")
    for name in ("a.png", "b.png"):
        assert (results / name).read_bytes().startswith(b"\x89PNG")


def write_probe(folder, name, errors=(), failed=None):
    """A probe.json of one matrix a kind; `errors` are the output errors by kind."""
    matrices = [{"kind": kind, "output_error": error} for kind, error in errors]
    values = sorted(error for _, error in errors)
    content = {"failed": failed, "positions": {"prose": 3, "code": 4}, "matrices": matrices}
    if not failed:
        kinds = {kind: {"output_error": {"median": error}} for kind, error in errors}
        both = {"output_error": {"median": values[0], "max": values[-1]}, "weight_error": {"median": 0.25}}
        content |= {"all": both | {"worst": f"layers.7.{errors[-1][0]}.weight"}, "kinds": kinds}
    write_json(folder / "m" / name / "probe.json", content)


def test_probed_candidates_are_sorted_by_their_median_output_error(results):
    recipe = RECIPE | {"probed": {"m": ["good", "bad", "rival"]}}
    write_probe(results, "good", [("q_proj", 0.2), ("up_proj", 0.5)])
    write_probe(results, "bad", [("q_proj", None)], failed="x: its error is not a number")
    write_probe(results, "rival", [("q_proj", 0.00004), ("qkv_proj", 0.1)])
    heading, text, rows = probe_sections(load_results(results, "m", recipe), results)
    assert heading.startswith("### ") and "7 positions of the evaluation text (code 4, prose 3)" in text
    header, _, first, second, last = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows.splitlines()]
    assert header[5:] == ["q_proj", "up_proj", "qkv_proj"]
    assert first == ["`rival` (bar)", "`layers.7.qkv_proj.weight`", "4.0e-05", "0.1000", "0.2500"] + [
        "4.0e-05",
        "–",
        "0.1000",
    ]
    assert second[0] == "`good` (baseline)" and second[2:] == ["0.2000", "0.5000", "0.2500", "0.2000", "0.5000", "–"]
    assert last == ["`bad`", "x: its error is not a number", "**failed**"] + ["–"] * 5
    assert probe_sections(load_results(results, "m", RECIPE), results) == []
    entry = {"evaluation": {}, "calibration": {}}
    assert heading in write_record([(load_results(results, "m", recipe), entry, results, None, {})], results)
    assert heading not in write_record([(load_results(results, "m", RECIPE), entry, results, None, {})], results)


def test_each_step_is_held_against_the_one_before(results):
    write_candidate(results, "same", 0.02)
    write_candidate(results, "better", 0.005)
    names = ["rival", "good", "same", "bad", "noise-hf", "better"]
    recipe = RECIPE | {"models": {"m": names}, "ablation": {"m": [name for name in names if name != "noise-hf"]}}
    write_json(results / "m" / "good" / "quantize.json", {"inputs": {"calibration": "f" * 64}})
    timing = results / "benchmarks" / "m" / "good" / "quantize.tsv"
    timing.parent.mkdir(parents=True)
    timing.write_text("s\th:m:s\tmax_rss\n9.0\t0:00:09\t10.2\n83.61\t0:01:23\t881.64\n")
    corpora = {"calibration": {"prose": {"windows": [20, 512]}, "code": {"windows": [2, 256]}}}
    loaded = load_results(results, "m", recipe)
    _, _, rows = ablation_sections(loaded, results, results / "benchmarks", corpora)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows.splitlines()[2:]]
    assert [row[0] for row in cells] == ["`rival` (bar)", "`good` (baseline)", "`same`", "`bad`", "`better`"]
    # KL of chunk c is kl * (1 + c / 10): means over chunks 0 to 3 are kl * 1.15
    assert cells[0][1:7] == ["4.25", "0.0575", "–", "–", "–", "1.000"]
    assert cells[1][2:4] == ["0.0230", "-0.0345"] and cells[1][5:] == ["helps", "0.400", "10752", "84", "881"]
    assert cells[2][5:7] == ["no difference", "0.400"] and cells[2][7:] == ["–"] * 3
    assert cells[3][2] == "**failed**" and cells[4][3:6] == ["–"] * 3  # nothing to hold it against
    turned = load_results(results, "m", recipe | {"ablation": {"m": ["good", "rival"]}})
    assert "**hurts**" in ablation_sections(turned, results, results, corpora)[2]
    assert ablation_sections(load_results(results, "m", RECIPE), results, results, corpora) == []


def test_figures_do_not_round_a_floor_to_zero():
    assert figure(0.0232) == "0.0232"
    assert figure(6e-11) == "6.0e-11"
    assert figure(0.0) == "0.0000"


def test_matrices_that_stay_plain_are_named(results):
    loaded = load_results(results, "m", RECIPE)
    heading, names = unquantized_lines(loaded)
    assert "Left unquantized" in heading
    six = ", ".join(f"`layers.{i}.weight`" for i in range(6))
    assert names == f"- `rival`: {six} and 2 more\n"


def test_recorded_figures_stand_beside_measured_ones(results, tmp_path):
    path = tmp_path / "recorded.json"
    figures = {
        "good": {"kl.mean": 0.02, "corpora.prose.kl.mean": 0.03, "bits_per_weight.all": 4.71, "ppl.difference": 0.5},
        "bad": {"kl.mean": 0.1},
        "elsewhere": {"top1": 0.966},
    }
    write_json(path, {"origin": "somebody's account", "candidates": figures})
    text = "\n".join(recorded_section(load_results(results, "m", RECIPE), path))
    assert "Recorded figures: somebody's account" in text
    # chunks 0 and 1 are prose: 0.02 * (1 + mean(0, 0.1)), of all four 0.02 * 1.15
    assert "| `good` (baseline) | kl.mean | 0.0230 | 0.0200 | +0.0030 |" in text
    assert "| `good` (baseline) | corpora.prose.kl.mean | 0.0210 | 0.0300 | -0.0090 |" in text
    assert "| `good` (baseline) | bits_per_weight.all | 4.25 | 4.71 | -0.46 |" in text
    assert "| `good` (baseline) | ppl.difference | 0.000 | 0.500 | -0.500 |" in text
    assert "| `bad` | kl.mean | failed | 0.1000 | – |" in text
    assert "| `elsewhere` | top1 | not in this table | 0.966 | – |" in text
    write_json(path, {"origin": "x", "candidates": {"good": {"kl.middle": 0.02}}})
    with pytest.raises(YardstickError, match="kl.middle is not a figure of a summary"):
        recorded_section(load_results(results, "m", RECIPE), path)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([1], "candidates must hold an object"),
        ({"good": [1]}, "candidates must hold an object"),
        ({"good": {"kl.mean": "0.05"}}, "good: kl.mean is '0.05', not a finite number"),
        ({"good": {"kl.mean": None}}, "good: kl.mean is None, not a finite number"),
        ({"good": {"kl.mean": float("nan")}}, "good: kl.mean is nan, not a finite number"),
        ({"absent": {"kl.mean": True}}, "absent: kl.mean is True, not a finite number"),
        ({"good": {"kl": 1.0}}, "kl of a summary is .*, not a finite number"),
        ({"good": {"kl.interval": 1.0}}, "kl.interval of a summary is .*, not a finite number"),
        ({"good": {"failed": 1.0}}, "failed of a summary is None, not a finite number"),
    ],
)
def test_recorded_figures_of_another_form_are_refused(results, tmp_path, candidates, message):
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps({"origin": "x", "candidates": candidates}))
    with pytest.raises(YardstickError, match=message):
        recorded_section(load_results(results, "m", RECIPE), path)


def test_the_best_row_in_our_packing_is_named_beside_the_baseline(results):
    loaded = load_results(results, "m", RECIPE | {"baseline": "rival", "bar": "good"})
    assert best_line(loaded) == []  # rows of a format that is not ours
    for name in ("good", "rival"):
        loaded.row(name).summary["recipe"]["evaluate"]["source"] = "packed"
    text = "In our packing, at no more bits than `rival`, the most faithful row is `good`: mean KL 0.023, 0.40 times"
    assert best_line(loaded) == [f"{text} the baseline's.\n"]
    loaded.bar = "noise-hf"
    loaded.row("noise-hf").summary["kl"]["mean"] = 0.01
    assert best_line(loaded) == [f"{text} the baseline's and 2.30 times the bar's.\n"]
    loaded.row("good").summary["bits_per_weight"]["all"] = 4.3
    assert best_line(loaded) == []
    assert best_line(load_results(results, "m", RECIPE | {"baseline": "bad"})) == []


def test_a_bar_that_is_not_made_for_the_model_is_said(results):
    assert verdict(load_results(results, "m", RECIPE | {"bar": "other"})) == (
        "The bar, `other`, is not in this table: it is not made for this model."
    )
    reason = {"other": "there is no reader for the format exl3"}
    loaded = load_results(results, "m", RECIPE | {"bar": "other", "not_measured": reason})
    assert verdict(loaded) == "The bar, `other`, is not in this table: there is no reader for the format exl3."
    assert not_measured_line(loaded) == ["Not measured: `other` (there is no reader for the format exl3).\n"]
    assert not_measured_line(load_results(results, "m", RECIPE)) == []
