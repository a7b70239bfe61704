"""Token windows: every token of the evaluation text is predicted exactly once.

A window of L positions holds L + 1 ids: inputs are ids[:-1], labels ids[1:]. Windows overlap by the one id that is
the last label of one and the first input of the next. Where the tokenizer puts a BOS in front, each window starts
with exactly one, and then windows need no overlap.
"""

import numpy as np
from tokenizers import Tokenizer

from yardstick.errors import YardstickError

OVERLAP_WINDOW = 64


def bos_id(tokenizer: Tokenizer) -> int | None:
    """The id that the tokenizer itself puts before a text, or None."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    return full[0] if len(full) > len(plain) and full[:1] != plain[:1] else None


def cut_windows(
    ids: np.ndarray, count: int, length: int, bos: int | None, what: str, spread: bool = False
) -> np.ndarray:
    """`count` evaluation windows of `length` positions: int32 [count, length + 1].

    They follow each other from the start of the text, or with `spread` lie at equal distances over all of it.

    Raises:
        YardstickError: the text is too short; says how many tokens it has and how many are needed.
    """
    overlap = 1 if bos is None else 0
    needed = count * length + overlap
    if len(ids) < needed:
        raise YardstickError(f"corpus {what}: has {len(ids)} tokens, {count} windows of {length} need {needed}")
    last = len(ids) - length - overlap
    starts = np.linspace(0, last, count).astype(np.int64) if spread else length * np.arange(count)
    return _rows(ids, starts, length + overlap, bos)


def cut_sequences(
    ids: np.ndarray, count: int, length: int, bos: int | None, what: str, spread: bool = True
) -> np.ndarray:
    """`count` calibration sequences of `length` ids: int32 [count, length].

    Raises:
        YardstickError: the text is too short for sequences that do not overlap.
    """
    body = length - (bos is not None)
    if len(ids) < count * body:
        raise YardstickError(f"corpus {what}: has {len(ids)} tokens, {count} sequences of {length} need {count * body}")
    starts = np.linspace(0, len(ids) - body, count).astype(np.int64) if spread else body * np.arange(count)
    return _rows(ids, starts, body, bos)


def _rows(ids: np.ndarray, starts: np.ndarray, width: int, bos: int | None) -> np.ndarray:
    rows = ids[starts[:, None] + np.arange(width)]
    if bos is not None:
        rows = np.concatenate((np.full((len(starts), 1), bos), rows), axis=1)
    return rows.astype(np.int32)


def find_shared_window(
    evaluation: np.ndarray, calibration: np.ndarray, width: int = OVERLAP_WINDOW
) -> tuple[int, int] | None:
    """(row of `evaluation`, row of `calibration`) of the first run of `width` equal ids, or None."""
    width = min(width, evaluation.shape[1], calibration.shape[1])
    seen: dict[bytes, int] = {}
    for row, ids in enumerate(evaluation):
        for window in np.lib.stride_tricks.sliding_window_view(ids, width):
            seen.setdefault(window.tobytes(), row)
    for row, ids in enumerate(calibration):
        for window in np.lib.stride_tricks.sliding_window_view(ids, width):
            if (found := seen.get(window.tobytes())) is not None:
                return found, row
    return None
