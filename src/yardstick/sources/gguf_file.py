"""The container of GGUF files: header, metadata and tensor table, over a memory map.

Long string arrays (a tokenizer's tokens and merges) are skipped and decoded only when asked for; decoding them takes
seconds, and measuring a file needs none of them. Layout: the GGUF specification, versions 2 and 3.
A large model comes in parts, `name-00001-of-00003.gguf` and so on: the first holds the metadata, each its own tensors.
"""

import mmap
import re
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
MAX_DIMENSIONS = 4
MAX_LENGTH = 2**24  # of a table, an array or a string; no file comes near, and a damaged one must not cost gigabytes
PART_NAME = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
# what a damaged header can raise: it can ask for anything
DAMAGE = (struct.error, ValueError, TypeError, ArithmeticError, LookupError, MemoryError, RecursionError)


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


class GgufPart:
    """One file: a whole model or one part of it.

    Raises:
        YardstickError: missing, not GGUF, truncated, damaged, or of an unknown type or version.
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
        except OSError as error:
            raise YardstickError(f"{path}: cannot be read ({error.strerror})") from None
        self._values: dict[str, tuple[int, int]] = {}  # key -> (type, offset of the value)
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except DAMAGE as error:
            raise YardstickError(f"{path}: truncated or not a GGUF file ({error})") from None

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise YardstickError(f"{self.path}: truncated or not a GGUF file (it does not begin with GGUF)")
        version, tensor_count, key_count = self._unpack("<IQQ", 4)
        if version not in (2, 3):
            raise YardstickError(f"{self.path}: GGUF version {version} is not supported (supported: 2, 3)")
        _require_length(tensor_count, "tensors")
        _require_length(key_count, "metadata keys")
        at = 24
        for _ in range(key_count):
            key, at = self._string(at)
            if key in self._values:
                raise YardstickError(f"{self.path}: GGUF metadata key {key} is there twice")
            (kind,) = self._unpack("<I", at)
            self._values[key] = (kind, at + 4)
            at = self._skip(kind, at + 4)
        entries = []
        for _ in range(tensor_count):
            name, at = self._string(at)
            (dimensions,) = self._unpack("<I", at)
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise YardstickError(f"{self.path}: tensor {name} has {dimensions} dimensions, must be 1 to 4")
            *sizes, kind, offset = self._unpack(f"<{dimensions}QIQ", at + 4)
            at += 4 + 8 * dimensions + 12
            entries.append((name, tuple(reversed(sizes)), kind, offset))
        self.alignment = self.number("general.alignment", ALIGNMENT)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise YardstickError(f"{self.path}: general.alignment is {self.alignment}, must be a power of two")
        start = -(-at // self.alignment) * self.alignment
        for name, shape, kind, offset in entries:
            self._add_tensor(name, shape, kind, start, offset)
        self._check_gaps(start, sorted((offset, name) for name, _, _, offset in entries))

    def _check_gaps(self, start: int, spans: list[tuple[int, str]]) -> None:
        """Tensors lie one after the other, with less than one alignment between them: a wrong type or size shows."""
        before, end = "the table", 0
        for offset, name in [*spans, (len(self._map) - start, "")]:
            if name and offset < end:
                raise YardstickError(f"{self.path}: tensors {before} and {name} overlap")
            if spans and offset - end >= self.alignment:
                raise YardstickError(
                    f"{self.path}: {offset - end} bytes after {before} belong to no tensor: a type or a shape is wrong"
                )
            before, end = name, offset + (self.tensors[name].data.nbytes if name else 0)

    def _add_tensor(self, name: str, shape: tuple[int, ...], number: int, start: int, offset: int) -> None:
        try:
            kind = GGMLQuantizationType(number)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise YardstickError(f"{self.path}: tensor {name} has type number {number}, which is not known") from None
        if min(shape) < 1:
            raise YardstickError(f"{self.path}: tensor {name} has shape {list(shape)}, which holds nothing")
        if shape[-1] % block:
            raise YardstickError(f"{self.path}: tensor {name} has {shape[-1]} columns, not whole {kind.name} blocks")
        if offset % self.alignment:
            raise YardstickError(f"{self.path}: tensor {name} begins at {offset}, not aligned to {self.alignment}")
        length = prod(shape) // block * size
        end = start + offset + length
        if end > len(self._map):
            raise YardstickError(
                f"{self.path}: truncated: tensor {name} needs bytes up to {end}, the file has {len(self._map)}"
            )
        if name in self.tensors:
            raise YardstickError(f"{self.path}: tensor {name} is there twice")
        data = np.frombuffer(self._map, dtype=np.uint8, count=length, offset=start + offset)
        self.tensors[name] = GgufTensor(name, shape, kind, data)

    def require_whole(self) -> None:
        """Refuse a file that was cut after it was opened: reading a mapped page that is gone ends the process.

        Raises:
            YardstickError: it is shorter than it was.
        """
        if self._map.size() < len(self._map):
            raise YardstickError(f"{self.path}: has become shorter since it was opened")

    def forget_pages(self) -> None:
        """Give back the memory of pages that were read; they come from the file again when they are needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value: number, bool, string or list.

        Raises:
            YardstickError: the key is missing and no default is given, or its value is damaged.
        """
        if key not in self._values:
            if default is None:
                raise YardstickError(f"{self.path}: GGUF metadata key {key} is missing")
            return default
        try:
            return self._decode(*self._values[key])
        except DAMAGE as error:
            raise YardstickError(f"{self.path}: GGUF metadata key {key} is damaged ({error})") from None

    def number(self, key: str, default: int | None = None) -> int:
        """A metadata value that is a whole number.

        Raises:
            YardstickError: as for `value`, or it is something else.
        """
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise YardstickError(f"{self.path}: GGUF metadata key {key} is {str(value)[:60]}, not a whole number")
        return value

    def _decode(self, kind: int, at: int) -> Any:
        if kind == STRING:
            return self._string(at)[0]
        if kind != ARRAY:
            return self._unpack("<" + self._scalar(kind), at)[0]
        item, count = self._unpack("<IQ", at)
        _require_length(count, "values")
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
        _require_length(count, "values")
        at += 12
        if item not in (STRING, ARRAY):
            return at + count * struct.calcsize("<" + self._scalar(item))
        for _ in range(count):
            at = self._skip(item, at)
        return at

    def _scalar(self, kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"metadata type {kind}")
        return SCALARS[kind]

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = self._unpack("<Q", at)
        _require_length(length, "bytes of a string")
        end = at + 8 + length
        if end > len(self._map):
            raise ValueError("a string runs past the end")
        return self._map[at + 8 : end].decode("utf-8"), end

    def _unpack(self, form: str, at: int) -> tuple:
        return struct.unpack_from(form, self._map, at)


class GgufFile:
    """An open GGUF model: one file, or all parts of a split one, whichever of them is named.

    Raises:
        YardstickError: a file is bad (see `GgufPart`), or the parts are not all there or do not belong together.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        part = GgufPart(self.path)
        count = part.number("split.count", 1)
        self.parts = open_parts(part, count) if count > 1 else [part]
        self.tensors = {name: tensor for part in self.parts for name, tensor in part.tensors.items()}

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value of the model; see `GgufPart.value`."""
        return self.parts[0].value(key, default)

    def number(self, key: str, default: int | None = None) -> int:
        """A metadata value of the model that is a whole number; see `GgufPart.number`."""
        return self.parts[0].number(key, default)

    def require_whole(self) -> None:
        """See `GgufPart.require_whole`."""
        for part in self.parts:
            part.require_whole()

    def forget_pages(self) -> None:
        """See `GgufPart.forget_pages`."""
        for part in self.parts:
            part.forget_pages()


def open_parts(part: GgufPart, count: int) -> list[GgufPart]:
    """All parts of a split file in order, from one of them.

    Raises:
        YardstickError: a part is missing, of another set or misnamed; a tensor is in two; some are in none.
    """
    number, total = part.number("split.no"), part.number("split.tensors.count")
    name = PART_NAME.fullmatch(part.path.name)
    if not name or (int(name[2]), int(name[3])) != (number + 1, count):
        ending = f"-{number + 1:05}-of-{count:05}.gguf"
        raise YardstickError(f"{part.path}: is part {number + 1} of {count}, so its name must end in {ending}")
    parts, home = [], {}
    for i in range(count):
        path = part.path.with_name(f"{name[1]}{i + 1:05}-of-{count:05}.gguf")
        if not path.is_file():
            raise YardstickError(f"{path}: no such file; it is part {i + 1} of {count}, and all are needed")
        other = part if i == number else GgufPart(path)
        found = (other.number("split.no"), other.number("split.count"), other.number("split.tensors.count", total))
        if found != (i, count, total):
            raise YardstickError(f"{path}: is not part {i + 1} of the {count} parts of {part.path.name}")
        parts.append(other)
        # a part that does not repeat an unusual alignment would be read from the wrong byte
        if other.alignment != parts[0].alignment:
            raise YardstickError(
                f"{path}: general.alignment is {other.alignment}, but {parts[0].alignment} in the first part"
            )
        for tensor in other.tensors:
            if tensor in home:
                raise YardstickError(f"{path}: tensor {tensor} is in {home[tensor]} too")
            home[tensor] = path.name
    if len(home) != total:
        raise YardstickError(f"{parts[0].path}: its {count} parts hold {len(home)} tensors, must be {total}")
    return parts


def _require_length(length: int, what: str) -> None:
    if length > MAX_LENGTH:
        raise ValueError(f"{length} {what}")
