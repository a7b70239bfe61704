"""A model that lies on this machine: its manifest says where, and the digest of every file."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

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


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        YardstickError: tokenizer.json is damaged.
    """
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise YardstickError(f"{folder / 'tokenizer.json'}: damaged ({' '.join(str(error).split())[:120]})") from None


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Real rows of the head: those up to the highest id. A checkpoint may pad its vocabulary beyond them."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def context_length(folder: Path) -> int | None:
    """Positions that the model was made for (`max_position_embeddings`), where its config says so."""
    settings = read_json(folder / "config.json")
    for place in (settings, settings.get("text_config")):
        length = place.get("max_position_embeddings") if isinstance(place, dict) else None
        if isinstance(length, int) and not isinstance(length, bool):
            return length
    return None


def end_ids(folder: Path) -> set[int]:
    """Every id that the model's files call an end of text.

    Raises:
        YardstickError: there is none, so that nothing would end a text.
    """
    found = {_token_id(folder, "eos_token")}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            for place in (settings, settings.get("text_config")):
                ids = place.get("eos_token_id") if isinstance(place, dict) else None
                found.update(ids if isinstance(ids, list) else [ids])
    found = {i for i in found if isinstance(i, int) and not isinstance(i, bool)}
    if not found:
        raise YardstickError(f"{folder}: no eos_token_id in its configs; nothing would end a text")
    return found


def start_id(folder: Path) -> int:
    """The id that a text of the model begins with: its BOS, or where it has none what stands between two documents."""
    start = _token_id(folder, "bos_token")
    return min(end_ids(folder)) if start is None else start


def _token_id(folder: Path, role: str) -> int | None:
    """Id of a special token that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    token = read_json(path).get(role) if path.is_file() else None
    token = token.get("content") if isinstance(token, dict) else token
    return load_tokenizer(folder).token_to_id(token) if isinstance(token, str) else None


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
