"""Checkpoint folders in which quantized matrices are stored in parts: what all such formats share.

A format names its quantized tensors: for each, the stored tensors that belong to it and a function that decodes it.
Everything else in the folder is a plain tensor under its own name. A stored tensor that belongs to nothing keeps its
name, and the audit calls it left over.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from yardstick.errors import YardstickError
from yardstick.files import read_json
from yardstick.models.config import ModelConfig
from yardstick.sources.base import LazyRows, TensorInfo, TensorSource
from yardstick.sources.hf import PLAIN, not_measured
from yardstick.sources.kinds import compiled
from yardstick.sources.safetensors_file import SafetensorsReader, checkpoint_files


@dataclass(frozen=True)
class Stored:
    """One quantized tensor: shape [out, in], scheme, the stored tensors it is made of, and how it is decoded.

    All parts count in its bits. `decode` gives fp32 [out, in].
    """

    shape: tuple[int, ...]
    scheme: str
    parts: tuple[str, ...]
    decode: Callable[[], torch.Tensor]


class FolderSource(TensorSource):
    """A folder of safetensors with a `quantization_config`.

    `base` is the original's source, where it is at hand: some formats hold labels against it that are wrong at times.
    """

    def __init__(self, path: Path, base: TensorSource | None = None) -> None:
        super().__init__(path)
        self._base = base
        self.reader = self.open_reader()
        self.settings = self.quantization_config()
        self._stored = self.quantized()
        self._infos: dict[str, TensorInfo] = {}
        consumed: dict[str, str] = {}
        for name, stored in self._stored.items():
            for part in stored.parts:
                if part not in self.reader.headers:
                    raise YardstickError(f"{path}: tensor {part} is missing")
                if part in consumed:
                    raise YardstickError(f"{path}: tensor {part} belongs to both {consumed[part]} and {name}")
                consumed[part] = name
            bits = sum(self.reader.stored_bits(part) for part in stored.parts)
            self._infos[name] = TensorInfo(tuple(stored.shape), stored.scheme, bits)
        for name, header in self.reader.headers.items():
            if name in consumed:
                continue
            if name in self._infos:
                raise YardstickError(f"{path}: tensor {name} is stored both quantized and plain")
            self._infos[name] = TensorInfo(
                tuple(header["shape"]), header["dtype"].lower(), self.reader.stored_bits(name)
            )

    @classmethod
    def open(cls, path: Path, config: ModelConfig | None = None, base: TensorSource | None = None) -> "FolderSource":
        return cls(path, base)

    def original(self, name: str, shape: tuple[int, int]) -> "torch.Tensor | LazyRows | None":
        """The original's matrix by rows; None where it is not at hand, or has no such matrix, as of a tied head.

        Raises:
            YardstickError: it has another shape.
        """
        if self._base is None or name not in self._base.infos():
            return None
        if self._base.infos()[name].shape != shape:
            raise YardstickError(f"{self.path}: tensor {name} has another shape in {self._base.path}")
        return self._base.rows(name)

    def open_reader(self) -> SafetensorsReader:
        """Headers and tensors of the checkpoint; a format that does not use safetensors brings its own reader."""
        return SafetensorsReader(checkpoint_files(self.path))

    @abstractmethod
    def quantized(self) -> dict[str, Stored]:
        """Every quantized tensor by its Hugging Face name; reads headers, and of data only shapes and settings.

        Raises:
            YardstickError: a scheme that this reader does not know, by the tensor's name.
        """

    def quantization_config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json, wherever the family keeps it.

        Raises:
            YardstickError: there is none.
        """
        config = read_json(self.path / "config.json")
        inner = config.get("text_config")
        places = [config, inner if isinstance(inner, dict) else {}]
        keys = ("quantization_config", "compression_config")  # the second in files of 2024
        settings = next((place[key] for place in places for key in keys if place.get(key)), None)
        if not isinstance(settings, dict):
            raise YardstickError(f"{self.path / 'config.json'}: holds no quantization_config")
        return settings

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def ignored(self) -> dict[str, str]:
        return not_measured(self._infos)

    def read(self, name: str) -> torch.Tensor:
        if name in self._stored:
            return self._stored[name].decode()
        if self.reader.headers[name]["dtype"] not in PLAIN:
            kind = self.reader.headers[name]["dtype"]
            raise YardstickError(f"{self.path}: tensor {name} has type {kind} and no scheme that says what it means")
        return self.reader.tensor(name)

    def rows(self, name: str) -> torch.Tensor | LazyRows:
        if name in self._stored or not isinstance(self.reader, SafetensorsReader):
            return self.get(name)
        return LazyRows(self, name, lambda start, stop: self.reader.tensor(name, start, stop))

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape of a tensor.

        Raises:
            YardstickError: it is not there.
        """
        if name not in self.reader.headers:
            raise YardstickError(f"{self.path}: tensor {name} is missing")
        return tuple(self.reader.headers[name]["shape"])

    def stems(self, suffix: str) -> list[str]:
        """Modules that have a stored tensor `<module><suffix>`, without those that are not measured."""
        found = [name.removesuffix(suffix) for name in self.reader.headers if name.endswith(suffix)]
        return [stem for stem in found if not not_measured([stem])]


def stored_shape(source: FolderSource, name: str, *types: str, ndim: int = 2) -> tuple[int, ...]:
    """Shape of a stored tensor that must be of one of these safetensors types and have `ndim` dimensions.

    Raises:
        YardstickError: it is not there, or is something else.
    """
    shape = source.shape(name)
    if source.reader.headers[name]["dtype"] not in types:
        kind = source.reader.headers[name]["dtype"]
        raise YardstickError(f"{source.path}: tensor {name} has type {kind}, not {' or '.join(types)}")
    if len(shape) != ndim or 0 in shape:
        raise YardstickError(f"{source.path}: tensor {name} has shape {list(shape)}, not {ndim} sizes")
    return shape


def object_at(source: FolderSource, *keys: str) -> dict[str, Any]:
    """An object inside the settings, empty if it is not there or null.

    Raises:
        YardstickError: it is something else.
    """
    found = source.settings
    for key in keys:
        found = found.get(key) or {}
        if not isinstance(found, dict):
            raise YardstickError(f"{source.path / 'config.json'}: {'.'.join(keys)} must be an object")
    return found


def matches(source: FolderSource, pattern: str, module: str) -> bool:
    """Whether a regular expression of the settings matches from the start of a module's name.

    Raises:
        YardstickError: it is not one.
    """
    return compiled(pattern, f"{source.path / 'config.json'}").match(module) is not None


def unpack_bits(packed: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Codes 0 .. 2^bits - 1 (int32) from int32 words along `dim`, lowest bits first.

    For widths that divide 32 each word holds 32 / bits codes. For 3 bits, 32 codes lie in three words, and two of them
    cross from one word to the next: the words are one stream of bits.
    """
    words = packed.movedim(dim, -1).to(torch.int64) & 0xFFFFFFFF
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits)
        codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        codes = codes.flatten(-2)
    else:
        stream = ((words.unsqueeze(-1) >> torch.arange(32)) & 1).flatten(-2)
        whole = stream.shape[-1] // bits * bits
        stream = stream[..., :whole].unflatten(-1, (-1, bits))
        codes = (stream << torch.arange(bits)).sum(-1)
    return codes.to(torch.int32).movedim(-1, dim)
