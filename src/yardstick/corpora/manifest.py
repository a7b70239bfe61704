"""Build the windows of an experiment and the manifest that lets anybody check that they have the same ones."""

import hashlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from yardstick.corpora.texts import Text, load_text
from yardstick.corpora.windows import bos_id, cut_sequences, cut_windows, find_shared_window
from yardstick.errors import YardstickError
from yardstick.files import read_json
from yardstick.models.folder import vocabulary_size

# fields of a manifest entry whose change explains a change of the ids, most telling first
GENERATED = "generated"  # marks the entries of texts that the model itself has written
EXPLAINING = ("origin", "text_sha256", "tokens", "windows", "ids_sha256")


def ids_sha256(ids: np.ndarray) -> str:
    """Digest of int32 ids, little-endian, row by row."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i4").tobytes()).hexdigest()


def build_windows(
    recipe: dict, tokenizer: Tokenizer, downloads: Path, written: dict[str, np.ndarray] | None = None
) -> tuple[dict, dict, dict]:
    """Arrays of evaluation windows and calibration sequences by corpus name, and their manifest.

    `written` holds the windows of the corpora of kind `generated`, which are ids already.

    Raises:
        YardstickError: a text cannot be had or is too short, or evaluation and calibration share a window.
    """
    bos = bos_id(tokenizer)
    arrays: dict[str, dict[str, np.ndarray]] = {"evaluation": {}, "calibration": {}}
    manifest: dict = {"bos": bos, "vocabulary": vocabulary_size(tokenizer)}
    for part, cut, key in (("evaluation", cut_windows, "chunks"), ("calibration", cut_sequences, "sequences")):
        length = recipe[part]["length"]
        entries = manifest[part] = {}
        for name, corpus in recipe[part]["texts"].items():
            generated = corpus["source"]["kind"] == "generated"
            if generated:
                rows = written[name]
                text = generated_text(rows, tokenizer, corpus["source"]["seed"])
                tokens = rows.size
            else:
                text = load_text(f"{part}.{name}", corpus["source"], downloads)
                ids = encode(tokenizer, text)
                rows = cut(ids, corpus[key], length, bos, f"{part}.{name}", corpus["spread"])
                tokens = len(ids)
            arrays[part][name] = rows
            entries[name] = {
                "origin": text.origin,
                "licence": corpus["licence"],
                "text_sha256": text.sha256,
                "tokens": tokens,
                "windows": list(rows.shape),
                "ids_sha256": ids_sha256(rows),
                **({GENERATED: True} if generated else {}),
            }
    require_disjoint(arrays)
    return arrays["evaluation"], arrays["calibration"], manifest


def generated_text(rows: np.ndarray, tokenizer: Tokenizer, seed: int) -> Text:
    """The text of ids that the model itself has written."""
    texts = tokenizer.decode_batch(rows.tolist(), skip_special_tokens=False)
    return Text("\n\n".join(texts), f"written by the model itself, seed {seed}")


def encode(tokenizer: Tokenizer, text: Text) -> np.ndarray:
    """Ids of a text without special tokens."""
    return np.array(tokenizer.encode(text.text, add_special_tokens=False).ids, dtype=np.int64)


def require_disjoint(arrays: dict) -> None:
    """Refuse evaluation text that calibration has seen.

    Raises:
        YardstickError: two corpora share a run of 64 ids.
    """
    for name, rows in arrays["evaluation"].items():
        for other, seen in arrays["calibration"].items():
            if shared := find_shared_window(rows, seen):
                raise YardstickError(
                    f"corpora: evaluation.{name} row {shared[0]} and calibration.{other} row {shared[1]} share "
                    "a run of 64 tokens; evaluation text must not be calibrated on"
                )


def require_same(manifest: dict, pinned_path: Path) -> None:
    """Compare a manifest with the pinned one, but for the texts that the model wrote here: another machine's arithmetic
    may draw another id, and all that follows it is then another text.

    Raises:
        YardstickError: says which corpus differs, and in what.
    """
    pinned = read_json(pinned_path, "bos", "vocabulary", "evaluation", "calibration")
    for key in ("bos", "vocabulary"):
        if manifest[key] != pinned[key]:
            raise YardstickError(
                f"corpora: {key} of the tokenizer is {manifest[key]}, {pinned_path} pins {pinned[key]}"
            )
    for part in ("evaluation", "calibration"):
        entries = {**pinned[part], **manifest[part]}
        for name in sorted(name for name, entry in entries.items() if GENERATED not in entry):
            if name not in pinned[part] or name not in manifest[part]:
                where = "the config" if name not in manifest[part] else str(pinned_path)
                raise YardstickError(f"corpora: {part}.{name} is not in {where}; remove corpora_pin or make a new pin")
            ours, theirs = manifest[part][name], pinned[part][name]
            for field in EXPLAINING:
                if ours[field] != theirs.get(field):
                    raise YardstickError(
                        f"corpora: {part}.{name} ({ours['origin']}): {field} is {ours[field]}, {pinned_path} pins "
                        f"{theirs.get(field)}; numbers would not be comparable"
                    )
