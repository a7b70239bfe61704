"""A model that lies on this machine: its manifest says where, and the digest of every file."""

from dataclasses import dataclass
from pathlib import Path

import torch

from yardstick.errors import YardstickError
from yardstick.files import canonical_json, read_json, sha256_file, sha256_text
from yardstick.models.config import ModelConfig, load_config
from yardstick.models.prefill import EMBEDDING_ROWS, expected_tensors
from yardstick.sources.base import audit_source
from yardstick.sources.hf import HuggingFaceSource


@dataclass(frozen=True)
class Original:
    """The unquantized model, opened: every step but retrieval starts here."""

    folder: Path
    config: ModelConfig
    source: HuggingFaceSource
    digest: str  # of all files, wherever they lie


def open_original(manifest: Path) -> Original:
    """Open the model of a manifest; a relative folder is relative to the manifest.

    Config, tokenizer and index are checked against their digests here, a file of weights when it is first read.

    Raises:
        YardstickError: the manifest is damaged, a file is gone or has changed since, or the tensors are not those
            that the config asks for.
    """
    content = read_json(manifest, "folder", "files")
    folder = Path(manifest).parent / content["folder"]
    weights = {}
    for name, digest in content["files"].items():
        if not (folder / name).is_file():
            raise YardstickError(
                f"{folder}: file {name} of {manifest} is gone; delete the manifest to fetch the model again"
            )
        if name.endswith(".safetensors"):
            weights[name] = digest
        elif sha256_file(folder / name) != digest:
            raise YardstickError(
                f"{folder}: file {name} is not the one that {manifest} was made of; delete the manifest to start again"
            )
    return open_folder(folder, weights, sha256_text(canonical_json(content["files"])))


def open_folder(folder: Path, weights: dict[str, str] | None = None, digest: str = "") -> Original:
    """Open a Hugging Face folder as it lies, with the digests of its weights where they are known.

    Raises:
        YardstickError: the config is not supported, or its tensors are not there.
    """
    config, source = load_config(folder), HuggingFaceSource(folder, weights)
    audit_source(source, expected_tensors(config, source))
    return Original(folder, config, source, digest)


def require_tied_head_is_a_copy(original: Original) -> None:
    """Some checkpoints of tied models store the head too; it must then be the embedding, which everybody else uses.

    Raises:
        YardstickError: it is not.
    """
    config, source = original.config, original.source
    if not config.tied_head or "lm_head.weight" not in source.infos():
        return
    head, table = source.rows("lm_head.weight"), source.rows(config.embedding_name)
    for start in range(0, config.vocab_size, EMBEDDING_ROWS):
        part = slice(start, start + EMBEDDING_ROWS)
        if not torch.equal(head[part], table[part]):
            raise YardstickError(
                f"{original.folder}: config.json ties the head to the embedding, but lm_head.weight differs from it "
                f"after row {start}; one of the two is wrong"
            )
