"""Write token windows and read them back: evaluation windows as one batch with the corpus of each, sequences."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from yardstick.errors import YardstickError
from yardstick.files import atomic_path


@dataclass(frozen=True)
class EvaluationWindows:
    """Windows of all corpora in the order of the file: ids int64 [chunks, length + 1] and a corpus name for each."""

    ids: torch.Tensor
    corpora: list[str]

    @property
    def inputs(self) -> torch.Tensor:
        return self.ids[:, :-1]

    @property
    def labels(self) -> torch.Tensor:
        return self.ids[:, 1:]

    def without(self, corpora: Collection[str]) -> "EvaluationWindows":
        """Windows of all other corpora."""
        kept = [row for row, name in enumerate(self.corpora) if name not in corpora]
        return EvaluationWindows(self.ids[kept], [self.corpora[row] for row in kept])


def write_arrays(target: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write ids by corpus name as an .npz file, atomically."""
    with atomic_path(target) as temporary, open(temporary, "wb") as stream:
        np.savez(stream, **arrays)


def load_windows(path: Path) -> EvaluationWindows:
    """Read chunks.npz.

    Raises:
        YardstickError: missing or damaged.
    """
    arrays = load_arrays(path)
    names = [name for name, rows in arrays.items() for _ in range(len(rows))]
    return EvaluationWindows(_join(path, arrays), names)


def load_calibration(path: Path) -> torch.Tensor:
    """Read calib.npz: ids int64 [sequences, length] of all corpora.

    Raises:
        YardstickError: missing or damaged.
    """
    return _join(path, load_arrays(path))


def _join(path: Path, arrays: dict[str, np.ndarray]) -> torch.Tensor:
    if len({rows.shape[1:] for rows in arrays.values()}) != 1 or any(rows.ndim != 2 for rows in arrays.values()):
        raise YardstickError(f"{path}: damaged: its windows are not all of one length")
    return torch.from_numpy(np.concatenate(list(arrays.values()))).long()


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Arrays of an .npz file by name; nothing pickled is read.

    Raises:
        YardstickError: missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as bundle:
            return {name: bundle[name] for name in bundle.files}
    except FileNotFoundError:
        raise YardstickError(f"{path}: no such file") from None
    except (ValueError, OSError, EOFError, KeyError) as error:
        raise YardstickError(f"{path}: damaged ({error})") from None
    except Exception as error:  # zipfile.BadZipFile is not an OSError
        raise YardstickError(f"{path}: damaged ({type(error).__name__}: {error})") from None
