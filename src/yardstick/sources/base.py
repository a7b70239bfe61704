"""A candidate is a tensor source: dequantized tensors under the model's Hugging Face names, with their stored bits.

Whatever a format does to a model (row permutations, packing, offsets) is undone inside its source and nowhere else.
Values are handed out exactly as the format defines them: fp32 for quantized tensors, the stored type for plain ones.
Rounding them to bf16 here would add an error of its own to 8-bit formats and would hide whether a reader is exact.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig


@dataclass(frozen=True)
class TensorInfo:
    """How one tensor is stored: shape, scheme (for example `int4-g128` or `Q4_K`) and exact bits.

    `bits` counts everything that is needed to decode it: codes, scales, minima, zero points, codebooks.
    """

    shape: tuple[int, ...]
    scheme: str
    bits: int

    @property
    def numel(self) -> int:
        """Number of weights."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class TensorSource(ABC):
    """Tensors of one checkpoint under the model's own names and orientation."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @classmethod
    def open(cls, path: Path, config: ModelConfig | None = None, base: "TensorSource | None" = None) -> "TensorSource":
        """Open a checkpoint with what is known of its model; formats that use some of it override this."""
        return cls(path)

    @abstractmethod
    def infos(self) -> dict[str, TensorInfo]:
        """Every tensor that the checkpoint holds, by Hugging Face name."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Decode one tensor; use `get`, which checks it."""

    def rows(self, name: str) -> "torch.Tensor | LazyRows":
        """A matrix that gives its rows by slices. Formats that can decode rows alone hand out `LazyRows`, so that a
        vocabulary of gigabytes is never held; by default the whole matrix is decoded."""
        return self.get(name)

    def ignored(self) -> dict[str, str]:
        """Tensors of the file that the forward does not need, with the reason for each."""
        return {}

    def get(self, name: str) -> torch.Tensor:
        """Decode one tensor.

        Raises:
            YardstickError: the tensor is missing, or holds a NaN or an infinity.
        """
        expected = require_values(self, name)
        tensor = self.read(name)
        if tuple(tensor.shape) != expected:
            raise YardstickError(f"{self.path}: tensor {name} has shape {tuple(tensor.shape)}, header says {expected}")
        require_finite(tensor, f"{self.path}: tensor {name}")
        return tensor


class LazyRows:
    """A matrix of a source that is read by rows: `len()` and slices, each decoded and checked when asked for."""

    def __init__(self, source: TensorSource, name: str, read: Callable[[int, int], torch.Tensor]) -> None:
        self._what, shape = f"{source.path}: tensor {name}", require_values(source, name)
        if not shape:
            raise YardstickError(f"{self._what} is a single number and has no rows")
        self._length, self._read = shape[0], read

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: slice) -> torch.Tensor:
        start, stop, _ = rows.indices(self._length)
        values = self._read(start, stop)
        require_finite(values, f"{self._what} from row {start}")
        return values


def require_values(source: TensorSource, name: str) -> tuple[int, ...]:
    """Shape of a tensor that the source has and that holds at least one value.

    Raises:
        YardstickError: it has not, or it is empty.
    """
    if name not in source.infos():
        raise YardstickError(f"{source.path}: tensor {name} is missing")
    shape = source.infos()[name].shape
    if 0 in shape:
        raise YardstickError(f"{source.path}: tensor {name} has shape {list(shape)}, which holds nothing")
    return shape


def require_finite(tensor: torch.Tensor, what: str) -> None:
    """Refuse NaN and infinity, naming the tensor and the first bad position.

    Raises:
        YardstickError: a value is not finite.
    """
    if bool(torch.isfinite(tensor.sum())):  # a fast way to yes; a sum may also overflow, so no is looked at
        return
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        position = tuple(int(i) for i in torch.nonzero(~finite)[0])
        raise YardstickError(f"{what} is not finite at {list(position)} ({float(tensor[position])})")


def audit_source(source: TensorSource, expected: dict[str, tuple[int, ...]]) -> None:
    """Check that the source holds every expected tensor with the right shape, and nothing that is left over.

    Raises:
        YardstickError: names the tensors that are missing, misshapen or left over.
    """
    infos = source.infos()
    missing = sorted(set(expected) - set(infos))
    if missing:
        raise YardstickError(f"{source.path}: tensor {_names(missing)} is missing")
    for name in sorted(expected):
        if infos[name].shape != expected[name]:
            raise YardstickError(
                f"{source.path}: tensor {name} has shape {list(infos[name].shape)}, the model's config asks for "
                f"{list(expected[name])}"
            )
    leftover = sorted(set(infos) - set(expected) - set(source.ignored()))
    if leftover:
        raise YardstickError(f"{source.path}: tensor {_names(leftover)} is left over; the model does not use it")


def _names(names: Iterable[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
