"""quantization.md: the whole record of an experiment, generated."""

from pathlib import Path

from yardstick.evaluate.statistics import QUANTILES
from yardstick.experiment import NOISE_FLOORS
from yardstick.files import read_json
from yardstick.report.ablation import ablation_sections
from yardstick.report.attribution import attribution_sections
from yardstick.report.gsm8k import gsm8k_sections
from yardstick.report.markdown import (
    fidelity_table,
    figure,
    interval,
    kl_interval,
    not_measured_line,
    reference_line,
    row_name,
    table,
)
from yardstick.report.probe import probe_sections
from yardstick.report.recorded import recorded_section
from yardstick.report.results import ModelResults, Row, best_line, verdict

METHOD = """## Method

Every candidate is read by a tensor source that undoes its format (packing, row order, codebooks) and goes through one
forward pass, layer by layer, in the same arithmetic and the same batches. The original is stored as its final hidden
states; together with its output head they give its logits back bit for bit, which is checked when they are written.
For each position the divergence KL(original ‖ candidate) runs over the whole vocabulary, with fp32 logits and fp64
sums; nothing is clamped, clipped to 16 bits or left out. Perplexity is exp(sum of NLL / positions). Top-1 is the share
of positions where both models put the same token first. Δp is the change of the probability of the true next token.
Intervals are 95 % percentile bootstraps that resample whole chunks of text, since positions of one chunk are not
independent; with few chunks they are rough. Differences are paired position by position.

Only weights are measured: where a format also quantizes activations or the cache at run time, that is not applied.
Intervals cover the choice of text. They do not cover the quantizer's own run: a GPTQ row is one draw, and a change in
the last bit of the arithmetic has moved it by several percent.

A candidate that gives a NaN, an infinite KL or a KL below −1e-6 anywhere is a failed row, with the first position
named; it has no averages. The noise floors show how much of a difference is the ruler's own:
"""


OWN_TEXT = """Text that the original itself has written, drawn from its own distribution at temperature 1: what its
users meet. It is in no figure over all texts. It also tests the ruler: on such text the mean difference of the two NLLs
is an estimate of the mean KL that is computed apart from it, and z is the distance of the two in standard errors.
Beyond 3 it says that something is measured wrongly. All candidates read the same draws, so their z go together.
"""


def write_record(models: list[tuple[ModelResults, dict, Path, str | None, dict]], benchmarks: Path) -> str:
    """The record of all models: results, corpora manifest, results folder, file of recorded figures and GSM8K runs of
    each; and the folder of what the runs cost."""
    floors = "\n".join(f"- *{name}*: {text}" for name, text in NOISE_FLOORS.items())
    parts = ["# Quantization record\n", METHOD, floors + "\n"]
    for results, corpora, folder, recorded, answers in models:
        parts += [f"## {results.model}\n", *model_sections(results, corpora, folder, answers, benchmarks)]
        if recorded:
            parts += ["### Beside recorded figures\n", *recorded_section(results, Path(recorded))]
    return "\n".join(parts)


def model_sections(results: ModelResults, corpora: dict, folder: Path, answers: dict, benchmarks: Path) -> list[str]:
    """All sections of one model."""
    parts = ["### Verdict\n", verdict(results) + "\n", *best_line(results), reference_line(results) + "\n"]
    parts += ["### Fidelity\n", fidelity_table(results) + "\n", *not_measured_line(results)]
    plots = f"plots/{results.model}"
    parts += [f"![Mean KL against bits]({plots}/kl-bits.png)\n", f"![Tail of the KL]({plots}/kl-tail.png)\n"]
    parts += ablation_sections(results, folder, benchmarks, corpora)
    parts += ["### Distribution of the KL\n", quantile_table(results) + "\n"]
    parts += ["### Perplexity and the true token\n", perplexity_table(results) + "\n"]
    parts += ["### By corpus\n", corpus_table(results) + "\n"]
    parts += own_text_section(results)
    if answers:
        fidelity = {row.name: row.kl for row in results.measured}
        parts += ["### Answers to arithmetic in words\n", *gsm8k_sections(answers, fidelity)]
    parts += ["### By confidence of the original\n", bucket_table(results, "confidence", "p1") + "\n"]
    parts += ["### By position in the chunk\n", bucket_table(results, "by_position", "from") + "\n"]
    parts += attribution_sections(results, folder)
    parts += ["### What is stored\n", storage_table(results) + "\n", *unquantized_lines(results)]
    parts += ["### Quantizers on their calibration data\n", *calibration_section(results, folder)]
    parts += probe_sections(results, folder)
    parts += ["### Corpora\n", corpora_table(corpora) + "\n"]
    parts += ["### Provenance\n", provenance_table(results) + "\n"]
    return parts


def quantile_table(results: ModelResults) -> str:
    header = ["candidate", "mean", "95 % interval", *QUANTILES, "max"]
    rows = []
    for row in results.measured:
        kl = row.summary["kl"]
        values = [figure(kl[name]) for name in (*QUANTILES, "max")]
        rows.append([row_name(row, results), figure(kl["mean"]), kl_interval(row), *values])
    return table(header, rows)


def perplexity_table(results: ModelResults) -> str:
    header = ["candidate", "PPL", "PPL / original", "± SE", "top-1", "95 % interval", "Δp mean", "Δp RMS"]
    rows = []
    for row in results.measured:
        ppl, delta = row.summary["ppl"], row.summary["delta_p"]
        error = "n/a" if ppl["ratio_error"] is None else f"{ppl['ratio_error']:.4f}"
        top1 = [f"{row.summary['top1']:.4f}", interval(row.summary["top1_interval"])]
        delta_p = [f"{delta['mean']:+.4f}", f"{delta['rms']:.4f}"]
        rows.append([row_name(row, results), f"{ppl['candidate']:.3f}", f"{ppl['ratio']:.4f}", error, *top1, *delta_p])
    return table(header, rows)


def corpus_table(results: ModelResults) -> str:
    header = ["candidate"]
    for name in results.corpora:
        header += [f"{name}: KL", "p99", "top-1", "PPL"]
    rows = []
    for row in results.measured:
        cells = [row_name(row, results)]
        for name in results.corpora:
            part = row.summary["corpora"][name]
            cells += [figure(part["kl"]["mean"]), figure(part["kl"]["p99"]), f"{part['top1']:.4f}"]
            cells.append(f"{part['ppl']['candidate']:.3f}")
        rows.append(cells)
    return table(header, rows)


def own_text_section(results: ModelResults) -> list[str]:
    """Text that the model itself has written, and the test of the ruler that it allows."""
    if not results.own_texts:
        return []
    rows = []
    for row in results.measured:
        for name in results.own_texts:
            part = row.summary["corpora"][name]
            ruler, z = part["ruler"], part["ruler"]["z"]
            cells = [row_name(row, results), name, figure(part["kl"]["mean"]), kl_interval(row, part)]
            cells.append(f"{part['top1']:.4f}")
            cells += ["–" if ruler[key] is None else figure(ruler[key]) for key in ("kl", "nll_difference", "error")]
            rows.append([*cells, "–" if z is None else f"{z:+.2f}"])
    header = [
        "candidate",
        "corpus",
        "KL mean",
        "95 % interval",
        "top-1",
        "KL of drawn ids",
        "NLL − original's",
        "± SE",
        "z",
    ]
    return ["### On the model's own text\n", OWN_TEXT, table(header, rows, left=2) + "\n"]


def bucket_table(results: ModelResults, key: str, label: str) -> str:
    """KL and top-1 agreement of every candidate in the buckets that its summary holds under `key`."""
    if not results.measured:
        return ""
    buckets = results.measured[0].summary[key]
    header = ["candidate"] + [f"{label} {b['from']:g}–{b['to']:g} (n {b['positions']}): KL / top-1" for b in buckets]
    rows = []
    for row in results.measured:
        cells = ["–" if b["kl"] is None else f"{figure(b['kl'])} / {b['top1']:.3f}" for b in row.summary[key]]
        rows.append([row_name(row, results), *cells])
    return table(header, rows)


def storage_table(results: ModelResults) -> str:
    header = ["candidate", "schemes (matrices)", "body", "head", "all", "MB stored"]
    rows = []
    for row in results.rows:
        bits = row.summary["bits_per_weight"]
        names = ", ".join(f"{scheme} ({count})" for scheme, count in row.summary["schemes"].items())
        size = f"{bits['file_bytes'] / 1e6:.1f}"
        rows.append([row_name(row, results), names, *(f"{bits[p]:.3f}" for p in ("body", "head", "all")), size])
    return table(header, rows, left=2)


def unquantized_lines(results: ModelResults, most: int = 6) -> list[str]:
    """Which matrices a candidate leaves as they are: they count in its bits, and in its KL."""
    lines = []
    for row in results.rows:
        names = row.summary.get("unquantized") or []
        if names:
            more = f" and {len(names) - most} more" if len(names) > most else ""
            lines.append(f"- `{row.name}`: {', '.join(f'`{name}`' for name in names[:most])}{more}")
    return ["Left unquantized (all names are in summary.json):\n", "\n".join(lines) + "\n"] if lines else []


def calibration_section(results: ModelResults, folder: Path) -> list[str]:
    """Output error of the variants that calibrate, against round-to-nearest on the same data."""
    rows, exceptions = [], []
    for row in results.rows:
        path = folder / results.model / row.name / "quantize.json"
        record = read_json(path) if path.is_file() else {}
        matrices = record.get("matrices") or []
        if not matrices:
            continue
        ratios = sorted(m["output_error"] / m["output_error_rtn"] for m in matrices if m["output_error_rtn"] > 0)
        weight = sorted(m["weight_error"] / m["weight_error_rtn"] for m in matrices if m["weight_error_rtn"] > 0)
        below = len(matrices) - len(record["not_below_rtn"])
        rows.append([row_name(row, results), f"{below} of {len(matrices)}", *(f"{r:.3f}" for r in spread(ratios))])
        rows[-1].append(f"{spread(weight)[1]:.3f}")
        exceptions += [f"- `{row.name}`: {name}" for name in record["not_below_rtn"]]
    header = [
        "variant",
        "output error below RTN's",
        "least ratio",
        "median ratio",
        "greatest ratio",
        "median weight-error ratio",
    ]
    note = "Ratios are to round-to-nearest at the same group size, matrix by matrix.\n"
    parts = [note, table(header, rows) + "\n"]
    return parts + (["Not below round-to-nearest:\n", "\n".join(exceptions) + "\n"] if exceptions else [])


def spread(values: list[float]) -> tuple[float, float, float]:
    """Least, median and greatest of sorted values."""
    return (values[0], values[len(values) // 2], values[-1]) if values else (float("nan"),) * 3


def corpora_table(corpora: dict) -> str:
    header = ["part", "corpus", "text", "licence", "windows", "sha256 of text", "sha256 of ids"]
    rows = []
    for part in ("evaluation", "calibration"):
        for name, entry in corpora[part].items():
            windows = f"{entry['windows'][0]} × {entry['windows'][1]}"
            digests = [f"`{entry[key][:12]}`" for key in ("text_sha256", "ids_sha256")]
            rows.append([part, name, entry["origin"], entry["licence"], windows, *digests])
    return table(header, rows, left=4)


def provenance_table(results: ModelResults) -> str:
    header = ["candidate", "recipe", "recipe digest", "checkpoint", "code"]
    rows = [[row_name(row, results), recipe_text(row), *digests(row)] for row in results.rows]
    summary = results.rows[0].summary["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    machine = summary["machine"]
    return "\n\n".join(
        [
            table(header, rows, left=5),
            f"Metric version {summary['metric_version']}; device {summary['device']}, {machine['cpu']}, "
            f"{machine['system']}; {versions}.",
            f"Inputs: model `{summary['inputs']['model'][:12]}`, chunks `{summary['inputs']['chunks'][:12]}`, "
            f"reference `{summary['inputs']['reference'][:12]}`.",
        ]
    )


def recipe_text(row: Row) -> str:
    settings = row.summary["recipe"]
    made = ", ".join(f"{key} {value}" for key, value in settings["candidate"].items() if value not in (None, False))
    measured = settings["evaluate"]
    return f"{made}; {measured['forward']} forward in {measured['dtype']}"


def digests(row: Row) -> list[str]:
    proof = row.summary["provenance"]
    checkpoint = proof["inputs"].get("checkpoint")
    return [
        f"`{proof['recipe_sha256'][:12]}`",
        f"`{checkpoint[:12]}`" if checkpoint else "–",
        f"`{proof['code_sha256'][:12]}`",
    ]
