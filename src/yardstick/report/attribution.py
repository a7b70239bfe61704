"""The record's section on where a loss comes from: rows of parts, and every attributed candidate by module."""

from pathlib import Path

from yardstick.files import read_json
from yardstick.report.markdown import figure, interval, signed_interval, table
from yardstick.report.results import ModelResults, Row

WORST = 10
NOTE = """A module is the candidate's while everything else is the original's. The KL is that of the model's output from
the original's, in fp32, on {positions} positions ({rows} stretches of {length} tokens: {corpora}). With so little
context it is larger than over whole windows; shares are what to read. Losses need not add up: a sum of single swaps
above the whole says that they cancel in part, one below it that they make each other worse.
"""


def attribution_sections(results: ModelResults, folder: Path) -> list[str]:
    """Parts and attributions of one model; nothing where the config asks for neither."""
    parts = ["### Where the loss comes from\n"] if results.parts or results.attributed else []
    if results.parts:
        parts += [parts_table(results) + "\n"]
    for name in results.attributed:
        record = read_json(folder / results.model / name / "attribution.json", "branches", "failed", "positions")
        parts += [f"#### `{name}` by module\n", *candidate_section(record)]
    return parts


def parts_table(results: ModelResults) -> str:
    """Rows made of parts of two models, each beside the candidate that it changes."""
    header = ["parts", "what", "bits body", "head", "all", "KL mean", "95 % interval", "− whole candidate", "top-1"]
    rows = []
    for row in results.parts:
        bits = row.summary["bits_per_weight"]
        cells = [f"`{row.name}`", description(row), *(f"{bits[part]:.2f}" for part in ("body", "head", "all"))]
        if row.failed:
            rows.append([*cells, "**failed**", row.failed, "–", "–"])
            continue
        kl = row.summary["kl"]
        cells += [figure(kl["mean"]), interval(kl["interval"]), signed_interval(row.difference)]
        rows.append([*cells, f"{row.summary['top1']:.4f}"])
    return table(header, rows, left=2)


def description(row: Row) -> str:
    """What a row of parts is made of, in words."""
    part = row.summary["recipe"]["candidate"]
    kept = part["keep_bf16"].replace("|", "\\|") if part["keep_bf16"] else None
    words = [f"the head of `{part['head_from']}`"] if part["head_from"] else []
    words += [f"`{kept}` of the original"] if kept else []
    return f"`{part['candidate']}` with {' and '.join(words)}"


def candidate_section(record: dict) -> list[str]:
    """Tables, sentences and plot of one attributed candidate."""
    if record["failed"]:
        return [f"**failed**: {record['failed']}\n"]
    sample, branches = record["positions"], record["branches"]
    corpora = ", ".join(f"{name} {count}" for name, count in sample["corpora"].items())
    positions = sample["rows"] * sample["length"]
    lines = [NOTE.format(positions=positions, rows=sample["rows"], length=sample["length"], corpora=corpora)]
    lines += [share_table([b for b in branches if b["group"] == "part"], "part", record) + "\n"]
    kinds, matrices = ([b for b in branches if b["group"] == group] for group in ("kind", "matrix"))
    if kinds:
        lines += [share_table(kinds, "kind", record) + "\n"]
    if matrices:
        worst = sorted(matrices, key=lambda b: -b["kl"])[:WORST]
        lines += ["The modules whose single swap costs most:\n", share_table(worst, "matrix", record) + "\n"]
    lines += [additivity_line(record["additivity"], record) + "\n"]
    return [*lines, f"![By layer and kind](plots/{record['model']}/attribution-{record['candidate']}.png)\n"]


def share_table(entries: list[dict], group: str, record: dict) -> str:
    """KL of some branches, its share of the sum over their whole group, and what it is a million weights."""
    total = record["additivity"][group]["sum"]
    header = [group, "KL", "share of the sum", "top-1", "weights (millions)", "bits", "KL per million weights"]
    rows = []
    for entry in sorted(entries, key=lambda b: -b["kl"]):
        share = "–" if entry["name"] == "all" or total <= 0 else f"{entry['kl'] / total:.1%}"
        weights = entry["weights"]
        stored = [f"{weights / 1e6:.2f}", f"{entry['bits'] / weights:.2f}", figure(entry["kl"] * 1e6 / weights)]
        rows.append([f"`{entry['name']}`", figure(entry["kl"]), share, f"{entry['top1']:.4f}", *stored])
    return table(header, rows)


def listed(names: list[str]) -> str:
    """Names as a list in a sentence."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def additivity_line(sums: dict, record: dict) -> str:
    """How far single losses add up to the whole one, in words."""
    words = {
        "matrix": f"the {sums.get('matrix', {}).get('count')} single swaps",
        "kind": "the kinds",
        "layer": "the layers and what is outside of them",
        "part": listed([b["name"] for b in record["branches"] if b["group"] == "part" and b["name"] != "all"]),
    }
    found = [
        f"{words[group]} sum to {figure(sums[group]['sum'])}"
        + (f" ({sums[group]['ratio']:.2f} times)" if sums[group]["ratio"] is not None else "")
        for group in words
        if group in sums
    ]
    return f"The whole candidate has {figure(sums['all'])} here; {'; '.join(found)}."
