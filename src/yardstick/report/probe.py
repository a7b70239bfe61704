"""The section of the record that holds each candidate's matrices against the original's."""

from pathlib import Path

from yardstick.files import read_json
from yardstick.report.markdown import figure, row_name, table
from yardstick.report.results import ModelResults

HEADER = ["candidate", "worst matrix", "output error: median", "max", "weight error: median"]


def probe_sections(results: ModelResults, folder: Path) -> list[str]:
    """Heading, what the figures are, and a row for each probed candidate, by median output error; failed ones last.

    `folder` holds <model>/<candidate>/probe.json. Nothing where no candidate is probed.

    Raises:
        YardstickError: a probe.json is missing or damaged.
    """
    keys = ("failed", "positions", "matrices")
    probes = {name: read_json(folder / results.model / name / "probe.json", *keys) for name in results.probed}
    if not probes:
        return []
    kinds = list(dict.fromkeys(matrix["kind"] for probe in probes.values() for matrix in probe["matrices"]))
    measured = {name: probe for name, probe in probes.items() if not probe["failed"]}
    order = sorted(measured, key=lambda name: (measured[name]["all"]["output_error"]["median"], name))
    rows = [probe_row(row_name(results.row(name), results), measured[name], kinds) for name in order]
    for name in sorted(set(probes) - set(measured)):
        cells = [row_name(results.row(name), results), probes[name]["failed"], "**failed**"]
        rows.append(cells + ["–"] * (len(HEADER) + len(kinds) - len(cells)))
    taken = next(iter(probes.values()))["positions"]
    counts = ", ".join(f"{corpus} {count}" for corpus, count in taken.items())
    text = (
        f"Relative error of each matrix's output, ‖(Ŵ − W)x‖ / ‖Wx‖, on the inputs x that the original gives it at "
        f"{sum(taken.values())} positions of the evaluation text ({counts}), factors that smoothing moved between "
        f"tensors undone; the columns by kind are medians over the layers. An error is the matrix's own: what the "
        f"layers before it did wrong is not in it, and errors of matrices that were tuned together may cancel, so this "
        f"tells where a candidate loses and does not rank candidates.\n"
    )
    return ["### Output error of each matrix\n", text, table([*HEADER, *kinds], rows, left=2) + "\n"]


def probe_row(name: str, probe: dict, kinds: list[str]) -> list[str]:
    errors = probe["all"]
    cells = [name, f"`{errors['worst']}`"]
    cells += [figure(errors["output_error"]["median"]), figure(errors["output_error"]["max"])]
    cells.append(figure(errors["weight_error"]["median"]))
    return cells + [
        figure(probe["kinds"][kind]["output_error"]["median"]) if kind in probe["kinds"] else "–" for kind in kinds
    ]
