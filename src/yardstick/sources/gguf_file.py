"""The container of GGUF files: header, metadata and tensor table, over a memory map.

Long string arrays (a tokenizer's tokens and merges) are skipped and decoded only when asked for; decoding them takes
seconds, and measuring a file needs none of them. Layout: the GGUF specification, versions 2 and 3.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from yardstick.errors import YardstickError

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table; `shape` is [out, in], slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray  # the tensor's bytes, uint8, one dimension

    @property
    def rows(self) -> np.ndarray:
        """Bytes by row: uint8 [rows, bytes of a row]."""
        return self.data.reshape(prod(self.shape[:-1]), -1)

    def part(self, start: int, stop: int) -> "GgufTensor":
        """Rows `start` to `stop` of a matrix."""
        data = self.rows[start:stop].reshape(-1)
        return GgufTensor(self.name, (stop - start, *self.shape[1:]), self.kind, data)


class GgufFile:
    """An open GGUF file.

    Raises:
        YardstickError: missing, not GGUF, truncated, of an unknown type or version, or one part of a split file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise YardstickError(f"{path}: no such file") from None
        except ValueError:
            raise YardstickError(f"{path}: truncated or not a GGUF file (it is empty)") from None
        except IsADirectoryError:
            raise YardstickError(f"{path}: is a folder, not a GGUF file") from None
        self._values: dict[str, tuple[int, int]] = {}  # key -> (type, offset of the value)
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except (struct.error, ValueError, TypeError, ArithmeticError, LookupError, MemoryError) as error:
            # a damaged header can ask for anything
            raise YardstickError(f"{path}: truncated or not a GGUF file ({error})") from None
        if int(self.value("split.count", 1)) > 1:
            raise YardstickError(
                f"{path}: is one part of a split file; join the parts with llama-gguf-split --merge first"
            )

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise YardstickError(f"{self.path}: truncated or not a GGUF file (it does not begin with GGUF)")
        version, tensor_count, key_count = self._unpack("<IQQ", 4)
        if version not in (2, 3):
            raise YardstickError(f"{self.path}: GGUF version {version} is not supported (supported: 2, 3)")
        at = 24
        for _ in range(key_count):
            key, at = self._string(at)
            (kind,) = self._unpack("<I", at)
            self._values[key] = (kind, at + 4)
            at = self._skip(kind, at + 4)
        entries = []
        for _ in range(tensor_count):
            name, at = self._string(at)
            (dimensions,) = self._unpack("<I", at)
            *sizes, kind, offset = self._unpack(f"<{dimensions}QIQ", at + 4)
            at += 4 + 8 * dimensions + 12
            entries.append((name, tuple(reversed(sizes)), kind, offset))
        alignment = int(self.value("general.alignment", ALIGNMENT))
        start = -(-at // alignment) * alignment
        for name, shape, kind, offset in entries:
            self._add_tensor(name, shape, kind, start + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> None:
        try:
            kind = GGMLQuantizationType(number)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise YardstickError(f"{self.path}: tensor {name} has type number {number}, which is not known") from None
        if shape[-1] % block:
            raise YardstickError(f"{self.path}: tensor {name} has {shape[-1]} columns, not whole {kind.name} blocks")
        length = prod(shape) // block * size
        if offset + length > len(self._map):
            raise YardstickError(
                f"{self.path}: truncated: tensor {name} needs bytes up to {offset + length}, "
                f"the file has {len(self._map)}"
            )
        if name in self.tensors:
            raise YardstickError(f"{self.path}: tensor {name} is there twice")
        data = np.frombuffer(self._map, dtype=np.uint8, count=length, offset=offset)
        self.tensors[name] = GgufTensor(name, shape, kind, data)

    def forget_pages(self) -> None:
        """Give back the memory of pages that were read; they come from the file again when they are needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value: number, bool, string or list.

        Raises:
            YardstickError: the key is missing and no default is given.
        """
        if key not in self._values:
            if default is None:
                raise YardstickError(f"{self.path}: GGUF metadata key {key} is missing")
            return default
        return self._decode(*self._values[key])

    def _decode(self, kind: int, at: int) -> Any:
        if kind == STRING:
            return self._string(at)[0]
        if kind != ARRAY:
            return self._unpack("<" + self._scalar(kind), at)[0]
        item, count = self._unpack("<IQ", at)
        at += 12
        if item not in (STRING, ARRAY):
            return list(self._unpack(f"<{count}{self._scalar(item)}", at))
        values = []
        for _ in range(count):
            values.append(self._decode(item, at))
            at = self._skip(item, at)
        return values

    def _skip(self, kind: int, at: int) -> int:
        """Offset after a value of type `kind` that begins at `at`."""
        if kind == STRING:
            return at + 8 + self._unpack("<Q", at)[0]
        if kind != ARRAY:
            return at + struct.calcsize("<" + self._scalar(kind))
        item, count = self._unpack("<IQ", at)
        at += 12
        if item not in (STRING, ARRAY):
            return at + count * struct.calcsize("<" + self._scalar(item))
        for _ in range(count):
            at = self._skip(item, at)
        return at

    def _scalar(self, kind: int) -> str:
        if kind not in SCALARS:
            raise YardstickError(f"{self.path}: truncated or not a GGUF file (metadata type {kind})")
        return SCALARS[kind]

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = self._unpack("<Q", at)
        end = at + 8 + length
        if end > len(self._map):
            raise struct.error("a string runs past the end")
        return self._map[at + 8 : end].decode("utf-8"), end

    def _unpack(self, form: str, at: int) -> tuple:
        return struct.unpack_from(form, self._map, at)
