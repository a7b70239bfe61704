"""Export a packed checkpoint as a folder of compressed-tensors: its shards, its config, the tokenizer beside them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from yardstick.errors import YardstickError
from yardstick.files import atomic_folder, read_json, write_json
from yardstick.models.config import WRAPPED, load_config
from yardstick.models.prefill import expected_tensors
from yardstick.progress import progress
from yardstick.quantize.checkpoint import INDEX, untie
from yardstick.quantize.repack import relative_error
from yardstick.rivals.export_ct import export_matrix, quantization_config, require_loadable
from yardstick.sources.base import audit_source
from yardstick.sources.hf import not_measured
from yardstick.sources.packed import CODES, MINIMA, SCALES, PackedSource
from yardstick.sources.safetensors_file import SafetensorsReader, checkpoint_files

COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*")
COPIED += ("generation_config.json", "*processor*.json")


def export_folder(source: PackedSource, base: Path | None, output: Path) -> dict:
    """Write a packed checkpoint to the folder `output`; a vision checkpoint also needs `base`, the original's folder.

    Returns:
        `tensors`, a report of each matrix, and `relative_error`, what integer zero points change the weights by.

    Raises:
        YardstickError: transformers or vLLM could not load it, or `base` is needed and not given.
    """
    torch.set_num_threads(1)  # nothing but small pieces; sums of several threads differ in their last digit
    folder, config = source.path, load_config(source.path)
    audit_source(source, expected_tensors(config, source))
    schemes = source.schemes
    require_loadable(folder, schemes, config)
    extra = unmeasured(folder, base)
    with atomic_folder(output) as temporary:
        reports, sums = write_shards(source, schemes, extra, temporary)
        raw = read_json(folder / "config.json")
        raw["quantization_config"] = quantization_config(schemes, source.infos(), config, bool(extra))
        if "lm_head.weight" in source.infos():
            untie(raw)
        write_json(temporary / "config.json", raw)
        copy_files([base, folder] if base else [folder], temporary)
    return {"tensors": reports, "relative_error": relative_error(sums)}


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


def copy_files(sources: list[Path], target: Path) -> None:
    """Copy tokenizer and the like; of a file that is in several folders the last counts."""
    for source in sources:
        for pattern in COPIED:
            for path in sorted(source.glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, target / path.name)
