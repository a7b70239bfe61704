"""Export a packed checkpoint as a compressed-tensors folder, for transformers and vLLM."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import read_json, sha256_file, write_json
from yardstick.models.config import WRAPPED, ModelConfig, load_config
from yardstick.models.prefill import expected_tensors
from yardstick.progress import progress
from yardstick.provenance import code_digest, package_versions
from yardstick.quantize.checkpoint import INDEX
from yardstick.quantize.repack import relative_error
from yardstick.report.markdown import table
from yardstick.rivals.export_ct import export_matrix, one_group, quantization_config, require_loadable
from yardstick.sources import audit_source
from yardstick.sources.hf import not_measured
from yardstick.sources.packed import CODES, MINIMA, SCALES, PackedSource
from yardstick.sources.safetensors_file import SafetensorsReader, checkpoint_files

RECORD = "export.json"
COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*")
COPIED += ("generation_config.json", "*processor*.json")


def main(arguments) -> None:
    torch.set_num_threads(1)  # nothing but small pieces; sums of several threads differ in their last digit
    folder, output = arguments.folder, arguments.output
    source, config = PackedSource(folder), load_config(folder)
    audit_source(source, expected_tensors(config, source))
    schemes = source.schemes
    require_loadable(folder, schemes, config)
    extra = unmeasured(folder, arguments.base)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise YardstickError(f"{output}: is there already; --output is a new folder")

    temporary = output.with_name(f".tmp-{output.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        reports, sums = write_shards(source, schemes, extra, temporary)
        raw = read_json(folder / "config.json")
        raw["quantization_config"] = quantization_config(schemes, source.infos(), config, bool(extra))
        if "lm_head.weight" in source.infos():
            untie(raw)
        write_json(temporary / "config.json", raw)
        copy_files([arguments.base, folder] if arguments.base else [folder], temporary)
        record = {
            "recipe": {"method": "export", "format": "compressed-tensors"},
            "inputs": {"checkpoint": sha256_file(folder / INDEX)},
            "code_sha256": code_digest("yardstick.cli.export"),
            "versions": package_versions(),
            "relative_error": relative_error(sums),
            "tensors": reports,
        }
        write_json(arguments.record or temporary / RECORD, record)
        if output.exists():
            output.rmdir()
        os.replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    show(reports, record["relative_error"])
    for line in doubts(schemes, config):
        print(f"note: {line}", file=sys.stderr)


def unmeasured(folder: Path, base: Path | None) -> SafetensorsReader | None:
    """The original's tensors, for the parts of a vision checkpoint that a packed one does not hold.

    Raises:
        YardstickError: they are needed, and there is no original.
    """
    family = read_json(folder / "config.json").get("model_type")
    if family not in WRAPPED:
        return None
    if base is None:
        raise YardstickError(
            f"{folder / 'config.json'}: {family} has a vision tower, which a packed checkpoint does not hold; "
            "give --base, the original's folder, to copy it from"
        )
    return SafetensorsReader(checkpoint_files(base))


def write_shards(
    source: PackedSource, schemes: dict[str, dict], extra: SafetensorsReader | None, folder: Path
) -> tuple[list[dict], list[float]]:
    """Write a file for each file of the packed checkpoint, one for the rest, and the index; returns the reports and
    the sums of squares over all matrices."""
    contents = list(shards(source, schemes, extra))
    reports, total, weight_map, size = [], [0.0, 0.0], {}, 0
    with progress("export", len(contents), "shard") as done:
        for number, (reader, names) in enumerate(contents, 1):
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                if name not in schemes:
                    tensors[name] = reader.tensor(name)
                    continue
                exported = export_matrix(reader, name, schemes[name])
                tensors |= exported.tensors
                reports.append(exported.report)
                total = [a + b for a, b in zip(total, exported.sums, strict=True)]
            file = f"model-{number:05d}-of-{len(contents):05d}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            os.chmod(folder / file, 0o644)
            weight_map |= dict.fromkeys(tensors, file)
            size += sum(tensor.nbytes for tensor in tensors.values())
            done(1)
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return reports, total


def shards(
    source: PackedSource, schemes: dict[str, dict], extra: SafetensorsReader | None
) -> Iterator[tuple[SafetensorsReader, list[str]]]:
    """Each shard: a reader, and the names of its tensors, a packed matrix under its own."""
    index = read_json(source.path / INDEX, "weight_map")
    matrix = {name.removesuffix(".weight") + CODES: name for name in schemes}
    files: dict[str, list[str]] = {}
    for stored, file in sorted(index["weight_map"].items()):
        if not stored.endswith((SCALES, MINIMA)):
            files.setdefault(file, []).append(matrix.get(stored, stored))
    for file in sorted(files):
        yield source.reader, files[file]
    if extra:
        yield extra, list(not_measured(extra.headers))


def untie(raw: dict) -> None:
    """The head is a tensor of its own."""
    raw["tie_word_embeddings"] = False
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"]["tie_word_embeddings"] = False


def copy_files(sources: list[Path], target: Path) -> None:
    """Copy tokenizer and the like; of a file that is in several folders the last counts."""
    for source in sources:
        for pattern in COPIED:
            for path in sorted(source.glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, target / path.name)


def show(reports: list[dict], total: float) -> None:
    header = ["tensor", "group size", "groups", "zero point clipped", "one value", "relative error"]
    rows = [
        [
            report["name"],
            *(str(report[key]) for key in ("group_size", "groups", "clipped_groups", "constant_groups")),
            f"{report['relative_error']:.2e}",
        ]
        for report in reports
    ]
    sums = [str(sum(report[key] for report in reports)) for key in ("groups", "clipped_groups", "constant_groups")]
    print(table(header, [*rows, ["all", "", *sums, f"{total:.2e}"]]))
    print(f"integer zero points change the weights by {total:.2e} of themselves", file=sys.stderr)


def doubts(schemes: dict[str, dict], config: ModelConfig) -> Iterator[str]:
    """What transformers loads and some versions or kernels of vLLM do not."""
    if "lm_head.weight" in schemes:
        yield "the head is quantized; vLLM reads that since March 2026"
    sizes = {scheme["group_size"] for scheme in schemes.values() if not one_group(scheme)}
    odd = sorted(sizes - {32, 64, 128})
    if odd:
        yield f"groups of {', '.join(map(str, odd))}; vLLM's Marlin kernels have 32, 64 and 128"
    narrow = next((name for name, scheme in schemes.items() if scheme["shape"][0] % 8), None)
    if narrow:
        yield f"{narrow} has {schemes[narrow]['shape'][0]} rows; vLLM asks for a multiple of 8"


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="the packed checkpoint")
    arguments.add_argument("--output", type=Path, required=True, help="new folder for the exported checkpoint")
    arguments.add_argument("--record", type=Path, help=f"record to write; {RECORD} in the new folder if left out")
    arguments.add_argument("--base", type=Path, help="the original's folder, needed where it has a vision tower")
    run_step(main, arguments)
