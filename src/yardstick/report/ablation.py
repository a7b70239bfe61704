"""The section of the record that says what each step of a method adds, and what it costs."""

import csv
from pathlib import Path

from yardstick.files import read_json
from yardstick.report.markdown import figure, interval, row_name, table
from yardstick.report.results import ModelResults, Step

HEADER = ["step", "bits", "KL mean", "− the step before", "95 % interval", "what it adds", "times the first"]
COSTS = ["calibration ids", "seconds", "peak MB"]
TEXT = """Each row is the one above with one thing more. A difference is paired position by position; where its interval
holds zero the step makes no difference that this text can show. Seconds and memory are of the run that made the
checkpoint, what it started from not counted; they depend on the machine. Calibration ids are all that a method may look
at, those that it holds out included. Bits may differ from row to row.
"""


def ablation_sections(results: ModelResults, folder: Path, benchmarks: Path, corpora: dict) -> list[str]:
    """Heading, what the figures are, and a row for each step; nothing where no steps are asked for.

    Args:
        folder: holds <model>/<candidate>/quantize.json.
        benchmarks: holds <model>/<candidate>/quantize.tsv, as Snakemake writes them.
        corpora: the manifest of the model's texts.
    """
    if not results.steps:
        return []
    ids = sum(entry["windows"][0] * entry["windows"][1] for entry in corpora["calibration"].values())
    first, rows = results.steps[0].row, []
    for step in results.steps:
        row = step.row
        cells = [row_name(row, results), f"{row.summary['bits_per_weight']['all']:.2f}"]
        if row.failed:
            rows.append([*cells, "**failed**", *["–"] * (len(HEADER) + len(COSTS) - len(cells) - 1)])
            continue
        times = "–" if first.failed or first.kl <= 0 else f"{row.kl / first.kl:.3f}"
        cells += [figure(row.kl), *difference_cells(step), times]
        rows.append(cells + costs(row.name, results.model, folder, benchmarks, ids))
    return ["### What each step adds\n", TEXT, table([*HEADER, *COSTS], rows) + "\n"]


def difference_cells(step: Step) -> list[str]:
    """Difference to the step before, its interval, and what follows from it."""
    if step.difference is None:
        return ["–", "–", "–"]
    mean, bounds = step.difference["mean"], step.difference["interval"]
    if bounds is None:
        return [f"{mean:+.4f}", "n/a", "one window cannot tell"]
    verdict = "no difference" if bounds[0] <= 0 <= bounds[1] else "helps" if mean < 0 else "**hurts**"
    return [f"{mean:+.4f}", interval(bounds), verdict]


def costs(name: str, model: str, folder: Path, benchmarks: Path, ids: int) -> list[str]:
    """Calibration ids, seconds and peak memory of a variant; a dash for what is not on record."""
    record, timing = folder / model / name / "quantize.json", benchmarks / model / name / "quantize.tsv"
    reads = record.is_file() and "calibration" in read_json(record).get("inputs", {})
    cells = [str(ids) if reads else "–"]
    if not timing.is_file():
        return [*cells, "–", "–"]
    with open(timing, encoding="utf-8", newline="") as stream:
        *_, last = csv.DictReader(stream, delimiter="\t")
    return [*cells, f"{float(last['s']):.0f}", last["max_rss"].partition(".")[0]]
