"""Markdown pieces that the table and the record share."""

from collections.abc import Sequence

from yardstick.report.results import ModelResults, Row


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are left-aligned, the rest right-aligned."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(value: float) -> str:
    """A KL in four decimals, or with a power of ten where that would read as zero."""
    return f"{value:.4f}" if abs(value) >= 0.0005 or value == 0 else f"{value:.1e}"


def interval(bounds: list[float] | None, digits: int = 4) -> str:
    return "n/a" if bounds is None else f"[{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def kl_interval(row: Row, part: dict | None = None) -> str:
    """Interval of a row's mean KL, over all or on one corpus; a noise floor that is zero to four decimals has none
    worth printing."""
    kl = (part or row.summary)["kl"]
    return "–" if row.is_noise and kl["mean"] < 0.0005 else interval(kl["interval"])


def signed_interval(difference: dict | None) -> str:
    if difference is None:
        return "–"
    return f"{difference['mean']:+.4f} {interval(difference['interval'])}"


def fidelity_table(results: ModelResults) -> str:
    """The main table of one model."""
    header = ["candidate", "bits body", "head", "all", "KL mean", "95 % interval", f"− {results.baseline}"]
    header += ["KL p99", "KL max", "top-1", "PPL"]
    header += [f"KL {name}" for name in results.corpora]
    return table(header, [fidelity_row(row, results) for row in results.rows])


def not_measured_line(results: ModelResults) -> list[str]:
    """A line that names the rivals without a row, where there are any."""
    names = [f"`{name}` ({reason})" for name, reason in results.not_measured.items()]
    return [f"Not measured: {'; '.join(names)}.\n"] if names else []


def fidelity_row(row: Row, results: ModelResults) -> list[str]:
    bits = row.summary["bits_per_weight"]
    cells = [row_name(row, results), *(f"{bits[part]:.2f}" for part in ("body", "head", "all"))]
    if row.failed:
        return [*cells, "**failed**", row.failed] + ["–"] * (5 + len(results.corpora))
    kl, summary = row.summary["kl"], row.summary
    return [
        *cells,
        figure(kl["mean"]),
        kl_interval(row),
        "–" if row.is_noise else signed_interval(row.difference),
        figure(kl["p99"]),
        figure(kl["max"]),
        f"{summary['top1']:.4f}",
        f"{summary['ppl']['candidate']:.3f}",
        *(figure(summary["corpora"][name]["kl"]["mean"]) for name in results.corpora),
    ]


def row_name(row: Row, results: ModelResults) -> str:
    marks = {results.bar: " (bar)", results.baseline: " (baseline)"}
    return f"*{row.name}*" if row.is_noise else f"`{row.name}`{marks.get(row.name, '')}"


def reference_line(results: ModelResults) -> str:
    """Perplexity of the original and the size of the measurement."""
    if not results.measured:
        return "Every candidate failed."
    summary = results.measured[0].summary
    ppl = summary["ppl"]["reference"]
    parts = {
        name: f"{name} {part['positions']} (PPL {part['ppl']['reference']:.2f})"
        for name, part in summary["corpora"].items()
    }
    own = [parts.pop(name) for name in results.own_texts]
    line = f"{summary['positions']} positions: {', '.join(parts.values())}. "
    line += f"Perplexity of the original over all of them: {ppl:.3f}."
    if own:
        line += f" Written by the model itself, in no figure over all: {', '.join(own)}."
    return line
