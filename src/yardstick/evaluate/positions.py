"""positions.parquet: one row per evaluated position, from which every later number is made."""

from pathlib import Path

import numpy as np
import pandas as pd

from yardstick.errors import YardstickError
from yardstick.files import atomic_path

COLUMNS = {
    "corpus": "category",
    "chunk": "int32",
    "position": "int32",
    "kl": "float64",
    "reference_nll": "float64",
    "nll": "float64",
    "reference_top1": "int32",
    "top1": "int32",
    "reference_top1_probability": "float32",
    "label_delta_p": "float32",
}


def positions_frame(divergence, corpora: list[str], length: int) -> pd.DataFrame:
    """One row per position: `corpora` names the corpus of each chunk, positions count from 0 in a chunk of `length`."""
    chunks = len(corpora)
    frame = pd.DataFrame(
        {
            "corpus": pd.Categorical(np.repeat(corpora, length), categories=list(dict.fromkeys(corpora))),
            "chunk": np.repeat(np.arange(chunks), length),
            "position": np.tile(np.arange(length), chunks),
            **{name: getattr(divergence, name).cpu().numpy() for name in divergence.__dataclass_fields__},
        }
    )
    return frame.astype(COLUMNS)[list(COLUMNS)]


def write_positions(path: Path, frame: pd.DataFrame) -> None:
    """Write the rows, atomically, with a checksum of every page."""
    with atomic_path(path) as temporary:
        frame.to_parquet(temporary, index=False, compression="zstd", write_page_checksum=True)


def read_positions(path: Path) -> pd.DataFrame:
    """Read the rows.

    Raises:
        YardstickError: missing, damaged, or columns are missing.
    """
    try:
        frame = pd.read_parquet(path, page_checksum_verification=True)
    except FileNotFoundError:
        raise YardstickError(f"{path}: no such file") from None
    except Exception as error:  # pyarrow's errors share no class
        raise YardstickError(f"{path}: damaged ({' '.join(str(error).split())[:120]})") from None
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise YardstickError(f"{path}: column {missing[0]} is missing")
    return frame
