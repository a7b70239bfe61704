"""Recorded figures of a published experiment beside those that were measured, with the difference."""

import math
from collections.abc import Iterator
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import read_json
from yardstick.report.markdown import row_name, table
from yardstick.report.results import ModelResults

DIGITS = {"bits_per_weight": 2, "kl": 4, "top1": 3, "ppl": 3}


def recorded_section(results: ModelResults, path: Path) -> list[str]:
    """Lines of Markdown: where the figures are from, and one row for each figure that was recorded.

    Raises:
        YardstickError: the file is damaged, or names a figure that no summary has.
    """
    content = read_json(path, "origin", "candidates")
    rows, known = [], {row.name: row for row in results.rows}
    for name, place, value in recorded_values(content["candidates"], path):
        row = known.get(name)
        if row is None or row.failed:
            cells = [f"`{name}`", place, "failed" if row else "not in this table", text(place, value), "–"]
        else:
            measured = number(lookup(row.summary, place, path), f"{path}: {place} of a summary")
            cells = [row_name(row, results), place, text(place, measured), text(place, value)]
            cells.append(f"{measured - value:+.{digits(place)}f}")
        rows.append(cells)
    header = ["candidate", "figure", "measured", "recorded", "difference"]
    return [f"Recorded figures: {content['origin']}\n", table(header, rows, left=2) + "\n"]


def recorded_values(candidates, path: Path) -> Iterator[tuple[str, str, float]]:
    """Candidate, place and value of every recorded figure.

    Raises:
        YardstickError: the file has another form, or a value is not a number.
    """
    if not isinstance(candidates, dict) or not all(isinstance(figures, dict) for figures in candidates.values()):
        raise YardstickError(f"{path}: candidates must hold an object of figures for each name")
    for name, figures in candidates.items():
        for place, value in figures.items():
            yield name, place, number(value, f"{path}: {name}: {place}")


def number(value, what: str) -> float:
    """A finite number.

    Raises:
        YardstickError: it is something else.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise YardstickError(f"{what} is {value!r}, not a finite number")
    return value


def lookup(summary: dict, place: str, path: Path) -> float:
    """A figure of a summary by its dotted place, such as `corpora.code.kl.mean`."""
    value = summary
    for key in place.split("."):
        if not isinstance(value, dict) or key not in value:
            raise YardstickError(f"{path}: {place} is not a figure of a summary (no {key})")
        value = value[key]
    return value


def digits(place: str) -> int:
    """Decimals of a figure, by its kind."""
    return next((DIGITS[key] for key in reversed(place.split(".")) if key in DIGITS), 4)


def text(place: str, value: float) -> str:
    return f"{value:.{digits(place)}f}"
