"""Read the results of a model, and the sentences that follow from them."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pandas as pd

from yardstick.errors import YardstickError
from yardstick.evaluate.positions import read_positions
from yardstick.evaluate.statistics import leave_out, paired_difference
from yardstick.experiment import NOISE_FLOORS
from yardstick.files import read_json


@dataclass
class Row:
    """One candidate: its summary, its positions, and its paired difference to the baseline (None where undefined)."""

    name: str
    summary: dict
    positions: pd.DataFrame | None
    difference: dict | None = None

    @property
    def failed(self) -> str | None:
        return self.summary["failed"]

    @property
    def is_noise(self) -> bool:
        return self.name in NOISE_FLOORS

    @property
    def kl(self) -> float:
        return self.summary["kl"]["mean"]


@dataclass
class Step:
    """One step of an ablation, with its paired difference to the step before; the first and failed ones have none."""

    row: Row
    difference: dict | None = None


@dataclass
class ModelResults:
    """All candidates of a model, the best first, failed ones last."""

    model: str
    baseline: str
    bar: str
    not_measured: dict[str, str] = field(default_factory=dict)  # rivals without a row, with the reason
    own_texts: list[str] = field(default_factory=list)  # corpora that the model itself has written
    probed: list[str] = field(default_factory=list)  # candidates that have a probe.json
    rows: list[Row] = field(default_factory=list)
    parts: list[Row] = field(default_factory=list)  # each with its paired difference to the candidate that it changes
    attributed: list[str] = field(default_factory=list)  # candidates with an attribution.json
    steps: list[Step] = field(default_factory=list)  # of the ablation, in its order

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    @property
    def measured(self) -> list[Row]:
        """Rows that did not fail."""
        return [row for row in self.rows if not row.failed]

    @property
    def corpora(self) -> list[str]:
        return list(self.measured[0].summary["corpora"]) if self.measured else []


def load_results(results: Path, model: str, recipe: dict) -> ModelResults:
    """Read summaries and positions of all candidates of `model`, and pair each with the baseline; also of the rows of
    parts that the recipe names, each paired with the candidate that it changes.

    Raises:
        YardstickError: a file is missing or damaged, or two candidates were measured on different positions.
    """
    loaded = ModelResults(model, recipe["baseline"], recipe["bar"], recipe.get("not_measured", {}))
    loaded.own_texts = recipe.get("own_texts", [])
    loaded.probed = recipe.get("probed", {}).get(model, [])
    own, parts = recipe.get("own_texts", []), recipe.get("parts", {}).get(model, [])
    loaded.rows = [read_row(Path(results) / model, name, own) for name in recipe["models"][model]]
    loaded.parts = [read_row(Path(results) / model, name, own) for name in parts]
    loaded.attributed = recipe.get("attribution", {}).get(model, [])
    baseline = loaded.row(loaded.baseline)
    loaded.steps = [Step(loaded.row(name)) for name in recipe.get("ablation", {}).get(model, [])]
    pairs = [(row, baseline) for row in loaded.rows if row is not baseline]
    pairs += [(part, loaded.row(part.summary["recipe"]["candidate"]["candidate"])) for part in loaded.parts]
    for row, other in pairs:
        row.difference = difference(model, row, other, recipe["seed"])
    for before, step in pairwise(loaded.steps):
        step.difference = difference(model, step.row, before.row, recipe["seed"])
    loaded.rows.sort(key=lambda row: (row.failed is not None, row.kl if not row.failed else 0.0, row.name))
    return loaded


def difference(model: str, row: Row, other: Row, seed: int) -> dict | None:
    """Paired difference of two rows; None where one has failed.

    Raises:
        YardstickError: they were measured on different positions.
    """
    if row.failed or other.failed:
        return None
    try:
        return paired_difference(row.positions, other.positions, seed)
    except ValueError as error:
        raise YardstickError(f"{model}: {row.name} and {other.name}: {error}; run the older one again") from None


def read_row(folder: Path, name: str, own_texts: list[str]) -> Row:
    """Summary of a candidate in the folder of its model, and its positions on the texts that figures over all are made
    of; a failed one has no positions.

    Raises:
        YardstickError: a file is missing or damaged.
    """
    summary = read_json(folder / name / "summary.json", "failed", "bits_per_weight", "provenance")
    if summary["failed"]:
        return Row(name, summary, None)
    return Row(name, summary, leave_out(read_positions(folder / name / "positions.parquet"), own_texts))


def verdict(results: ModelResults) -> str:
    """Whether the baseline meets the bar: its mean KL is no higher, or if it is, whether that is within noise."""
    if results.bar not in [row.name for row in results.rows]:
        reason = results.not_measured.get(results.bar, "it is not made for this model")
        return f"The bar, `{results.bar}`, is not in this table: {reason}."
    bar, ours = results.row(results.bar), results.row(results.baseline)
    for row in (bar, ours):
        if row.failed:
            return f"The bar cannot be judged: {row.name} failed ({row.failed})."
    bits = f"{ours.summary['bits_per_weight']['all']:.2f} against {bar.summary['bits_per_weight']['all']:.2f} bits"
    text = f"Bar: `{bar.name}` with mean KL {bar.kl:.4g}; `{ours.name}` has {ours.kl:.4g} ({bits} per weight): "
    if bar is ours or ours.kl <= bar.kl:
        return text + "the bar is met."
    low, high = bar.difference["interval"] or (None, None)
    within = low is not None and low <= 0 <= high
    if within:
        return text + "the bar is not met, though within noise."
    return text + "the bar is not met" + (f" ({ours.kl / bar.kl:.2f} times its KL)." if bar.kl > 0 else ".")


def best_line(results: ModelResults) -> list[str]:
    """The most faithful row in our packing at no more bits than the baseline, where that is another one."""
    baseline = results.row(results.baseline)
    if baseline.failed or baseline.kl <= 0:
        return []
    limit = baseline.summary["bits_per_weight"]["all"]
    packed = [row for row in results.measured if row.summary["recipe"]["evaluate"]["source"] == "packed"]
    small = [row for row in packed if row.summary["bits_per_weight"]["all"] <= limit]
    best = min(small, key=lambda row: row.kl, default=baseline)
    if best is baseline:
        return []
    text = f"In our packing, at no more bits than `{baseline.name}`, the most faithful row is `{best.name}`: mean KL"
    text += f" {best.kl:.4g}, {best.kl / baseline.kl:.2f} times the baseline's"
    bar = next((row for row in results.measured if row.name == results.bar), None)
    if bar and bar not in (best, baseline) and bar.kl > 0:
        text += f" and {best.kl / bar.kl:.2f} times the bar's"
    return [text + ".\n"]
