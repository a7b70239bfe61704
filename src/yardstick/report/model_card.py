"""The model card of one candidate, from its files alone: what it is, its figures, how they were measured, digests."""

from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import canonical_json, read_json, sha256_file, sha256_text
from yardstick.report.markdown import figure, interval, table

ORIGINS = {
    "rtn": "made here by rounding to nearest",
    "gptq": "made here by GPTQ",
    "convert": "taken over, code by code, from a checkpoint of another format",
    "gguf": "made here by ggml's row quantizers",
    "made": "made here by the format's own tool",
    "exported": "exported here from a variant of ours, with integer zero points",
    "hub": "published by others and fetched from the hub",
    "local": "made by others and read on this machine",
}
INDEX, MANIFEST = Path("checkpoint", "model.safetensors.index.json"), Path("checkpoint", "manifest.json")
DECODED = Path("decoded", "manifest.json")


def write_card(results: Path, model: str, candidate: str) -> str:
    """Markdown of `results/<model>/<candidate>`.

    Raises:
        YardstickError: a file is missing or damaged, or the files are not of one and the same checkpoint.
    """
    folder = Path(results) / model / candidate
    summary = read_json(folder / "summary.json", "failed", "bits_per_weight", "schemes", "recipe", "provenance")
    record = read_json(folder / "quantize.json", "recipe", "inputs", "code_sha256", "versions")
    files = checkpoint_digests(folder, summary)
    try:
        if summary["recipe"]["candidate"] != record["recipe"]:
            raise YardstickError(f"{folder}: summary.json is of another recipe than quantize.json; run it again")
        parts = [f"# {candidate} of {model}\n", *what_it_is(summary, record), *storage(summary)]
        if summary["failed"]:
            parts += ["## Figures\n", f"**The measurement failed**: {summary['failed']}. There are no figures.\n"]
        else:
            parts += ["## Figures\n", *figures(summary)]
        parts += ["## How it was measured\n", *measurement(summary)]
        parts += ["## Digests\n", *digests(summary, record, files)]
        parts += ["## Versions\n", *versions(summary, record)]
    except (KeyError, TypeError, AttributeError) as error:
        raise YardstickError(f"{folder}: summary.json or quantize.json is damaged ({error!r})") from None
    return "\n".join(parts)


def checkpoint_digests(folder: Path, summary: dict) -> dict[str, str]:
    """SHA-256 of the checkpoint's files by name, where an index or a manifest holds them.

    Raises:
        YardstickError: that file is not the one that was measured.
    """
    path = next((folder / name for name in (INDEX, MANIFEST) if (folder / name).is_file()), None)
    if path is None:
        return {}
    measured = summary["provenance"].get("inputs", {}).get("checkpoint")
    found = sha256_file(path)
    decoded = folder / DECODED
    if decoded.is_file():  # its weights were spelled out first, and that was measured
        found = sha256_file(decoded) if read_json(decoded).get("decoded_from") == found else None
    if measured != found:
        raise YardstickError(f"{path}: is not the checkpoint that summary.json was measured of; measure it again")
    content = read_json(path)
    if path.name == MANIFEST.name:
        return content.get("files") or {}
    return ((content.get("metadata") or {}).get("yardstick") or {}).get("sha256") or {}


def what_it_is(summary: dict, record: dict) -> list[str]:
    recipe = record["recipe"]
    kind = recipe.get("method") or recipe.get("kind")
    settings = {key: value for key, value in recipe.items() if key not in ("method", "kind") and value != {}}
    stored = ", ".join(f"{scheme} ({count} matrices)" for scheme, count in summary["schemes"].items())
    lines = [f"A quantized checkpoint, {ORIGINS.get(kind, f'made by {kind}')}. Stored as: {stored}.\n"]
    plain = summary.get("unquantized") or []
    if plain:
        lines.append(f"Not quantized: {', '.join(f'`{name}`' for name in plain)}.\n")
    rows = [[f"`{key}`", shown(value)] for key, value in sorted(settings.items())]
    if rows:
        lines += [table(["setting", "value"], rows, left=2) + "\n"]
    matrices = record.get("matrices") or []
    if matrices:
        below = len(matrices) - len(record["not_below_rtn"])
        lines.append(
            f"On its calibration data the output error is below round-to-nearest's for {below} of {len(matrices)} "
            "matrices.\n"
        )
    return lines


def shown(value) -> str:
    """A setting as the config spells it, in one cell."""
    text = value if isinstance(value, str) else canonical_json(value)
    return text.replace("|", "\\|").replace("\n", " ")


def storage(summary: dict) -> list[str]:
    bits = summary["bits_per_weight"]
    row = [*(f"{bits[part]:.3f}" for part in ("body", "head", "all")), f"{bits['file_bytes'] / 1e6:.1f}"]
    note = "Scales and zero points count; `all` is body and head, the MB are those of all tensors.\n"
    return ["## Size\n", table(["bits per weight: body", "head", "all", "MB stored"], [row], left=0) + "\n", note]


def figures(summary: dict) -> list[str]:
    header = ["text", "positions", "KL mean", "95 % interval", "KL p99", "KL max", "top-1", "95 % interval"]
    header += ["PPL original", "PPL", "ratio"]
    parts = {"all": summary} | summary["corpora"]
    rows = [[name, *figure_cells(part)] for name, part in parts.items()]
    note = (
        "KL is KL(original ‖ this) in nats over the whole vocabulary, lower is more faithful; top-1 is the share of "
        "positions where both put the same token first.\n"
    )
    return [table(header, rows) + "\n", note]


def figure_cells(part: dict) -> list[str]:
    kl, ppl = part["kl"], part["ppl"]
    return [
        str(part["positions"]),
        figure(kl["mean"]),
        interval(kl["interval"]),
        figure(kl["p99"]),
        figure(kl["max"]),
        f"{part['top1']:.4f}",
        interval(part["top1_interval"]),
        f"{ppl['reference']:.3f}",
        f"{ppl['candidate']:.3f}",
        f"{ppl['ratio']:.4f}",
    ]


def measurement(summary: dict) -> list[str]:
    proof, settings = summary["provenance"], summary["recipe"]["evaluate"]
    lines = []
    if not summary["failed"]:
        corpora = ", ".join(f"{name} {part['positions']}" for name, part in summary["corpora"].items())
        lines.append(f"- {summary['positions']} positions ({corpora}); intervals resample whole chunks of text")
    machine = proof["machine"]
    lines += [
        f"- {settings['forward']} forward in {settings['dtype']}, logits in float32; device {proof['device']}, "
        f"{machine['cpu']}, {machine['system']}",
        f"- metric version {proof['metric_version']}" + (f", seed {proof['seed']}" if "seed" in proof else ""),
    ]
    return ["\n".join(lines) + "\n"]


def digests(summary: dict, record: dict, files: dict[str, str]) -> list[str]:
    proof = summary["provenance"]
    rows = [
        ["recipe of the checkpoint", sha256_text(canonical_json(record["recipe"]))],
        ["recipe of the measurement", proof["recipe_sha256"]],
        ["code that made it", record["code_sha256"]],
        ["code that measured it", proof["code_sha256"]],
        *([f"{name} (measured)", digest] for name, digest in sorted(proof["inputs"].items())),
        *([f"{name} (made from)", digest] for name, digest in sorted(record["inputs"].items()) if name not in files),
        *([f"`{name}`", digest] for name, digest in sorted(files.items())),
    ]
    return [table(["what", "SHA-256"], [[name, f"`{digest}`"] for name, digest in rows], left=2) + "\n"]


def versions(summary: dict, record: dict) -> list[str]:
    def text(found: dict) -> str:
        return ", ".join(f"{name} {version}" for name, version in sorted(found.items())) or "none on record"

    measured, made = summary["provenance"]["versions"], record["versions"]
    if measured == made:
        return [f"Made and measured with {text(made)}.\n"]
    return [f"Made with {text(made)}.\n", f"Measured with {text(measured)}.\n"]
