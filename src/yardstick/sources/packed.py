"""Source `packed:`: our own checkpoints, int4 with a bf16 scale and a bf16 minimum per group of input columns."""

from collections.abc import Callable
from pathlib import Path

import torch

from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError
from yardstick.files import read_json
from yardstick.quantize.pack import MOST_TERMS, dequantize, group_count, sum_of_terms, unpack_nibbles
from yardstick.sources.base import LazyRows, TensorInfo, TensorSource
from yardstick.sources.hf import PLAIN
from yardstick.sources.kinds import is_size
from yardstick.sources.safetensors_file import SafetensorsReader, checkpoint_files

CODES, SCALES, MINIMA = ".weight_codes", ".weight_scales", ".weight_minima"


class PackedSource(TensorSource):
    """Quantized tensors dequantized to fp32; the rest as stored. Group sizes come from the checkpoint's index."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        index = read_json(self.path / "model.safetensors.index.json")
        metadata = index.get("metadata")
        packing = metadata.get("yardstick") if isinstance(metadata, dict) else None
        schemes = packing.get("tensors") if isinstance(packing, dict) else None
        if not isinstance(schemes, dict):
            raise YardstickError(f"{path}: the index holds no yardstick packing metadata; is it a packed: checkpoint?")
        digests = packing.get("sha256") or {}
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise YardstickError(f"{path}: the index holds sha256 that are no digests of files")
        self.schemes: dict[str, dict] = schemes
        self.reader = SafetensorsReader(checkpoint_files(self.path), digests)
        self._infos, consumed = {}, set()
        for name, scheme in self.schemes.items():
            parts = self._check(name, scheme)
            consumed.update(parts)
            bits = sum(self.reader.stored_bits(part) for part in parts)
            self._infos[name] = TensorInfo(tuple(scheme["shape"]), self.label(scheme), bits)
        for name, header in self.reader.headers.items():
            if name in consumed:
                continue
            if name in self._infos:
                raise YardstickError(f"{path}: tensor {name} is stored both quantized and plain")
            kind = header["dtype"]
            if kind not in PLAIN:
                raise YardstickError(f"{path}: tensor {name} has type {kind} and belongs to no packed matrix")
            self._infos[name] = TensorInfo(tuple(header["shape"]), kind.lower(), self.reader.stored_bits(name))

    @staticmethod
    def label(scheme: dict) -> str:
        """How tables name the scheme."""
        terms = scheme.get("terms", 1)
        return f"{'' if terms == 1 else f'{terms}x'}int4-g{scheme['group_size']}"

    def wanted(self, name: str, scheme: object) -> tuple[dict[str, tuple[str, list[int]]], str]:
        """Types and shapes of the stored tensors of a matrix by the ends of their names, and a word for what asks for
        them.

        Raises:
            YardstickError: the scheme does not say.
        """
        shape, size = (scheme.get("shape"), scheme.get("group_size")) if isinstance(scheme, dict) else (None, None)
        if not (is_shape(shape) and is_size(size)):
            raise YardstickError(f"{self.path}: tensor {name}: the index names no shape [out, in] and group size")
        terms = scheme.get("terms", 1)
        if type(terms) is not int or not 1 <= terms <= MOST_TERMS:
            raise YardstickError(f"{self.path}: tensor {name}: the index names {terms!r} terms, not 1 to {MOST_TERMS}")
        groups = [terms * shape[0], group_count(shape[1], size)]
        codes = ("U8", [terms * shape[0], -(-shape[1] // 2)])
        why = f"{shape} in groups of {size}" if terms == 1 else f"{shape} in {terms} terms and groups of {size}"
        return {CODES: codes, SCALES: ("BF16", groups), MINIMA: ("BF16", groups)}, why

    def _check(self, name: str, scheme: object) -> list[str]:
        """Stored tensors of a packed matrix, each of the type and shape that its scheme asks for."""
        wanted, why = self.wanted(name, scheme)
        stem = name.removesuffix(".weight")
        for end, (kind, expected) in wanted.items():
            header = self.reader.headers.get(stem + end)
            if header is None:
                raise YardstickError(f"{self.path}: tensor {stem + end} is missing")
            if (header["dtype"], header["shape"]) != (kind, expected):
                raise YardstickError(
                    f"{self.path}: tensor {stem + end} is {header['dtype']} {header['shape']}, {why} asks for "
                    f"{kind} {expected}"
                )
        return [stem + end for end in wanted]

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def packed(self, name: str) -> PackedWeight:
        """A packed matrix as it is stored."""
        stem, scheme = name.removesuffix(".weight"), self.schemes[name]
        codes, scales, minima = (self.reader.tensor(stem + end) for end in (CODES, SCALES, MINIMA))
        return PackedWeight(codes, scales, minima, scheme["shape"][1], scheme["group_size"], scheme.get("terms", 1))

    def read(self, name: str) -> torch.Tensor:
        return self._read_rows(name, 0, None)

    def rows(self, name: str) -> LazyRows:
        return LazyRows(self, name, lambda start, stop: self._read_rows(name, start, stop))

    def _read_rows(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        if name not in self.schemes:
            return self.reader.tensor(name, start, stop)
        scheme = self.schemes[name]
        rows, terms = scheme["shape"][0], scheme.get("terms", 1)
        first, last, _ = slice(start, stop).indices(rows)

        def stored(part: str) -> torch.Tensor:
            if terms == 1:
                return self.reader.tensor(part, start, stop)
            return torch.cat([self.reader.tensor(part, t * rows + first, t * rows + last) for t in range(terms)])

        return decode_matrix(stored, name, scheme)


def is_shape(shape: object) -> bool:
    """Whether an index's value is the shape of a matrix."""
    return isinstance(shape, list) and len(shape) == 2 and all(map(is_size, shape))


def decode_matrix(stored: Callable[[str], torch.Tensor], name: str, scheme: dict) -> torch.Tensor:
    """fp32 values [out, in] of one packed matrix, or of some of its rows; `stored` gives a stored tensor by name, of
    several terms the rows of each behind each other."""
    stem = name.removesuffix(".weight")
    codes = unpack_nibbles(stored(stem + CODES), scheme["shape"][1])
    values = dequantize(codes, stored(stem + SCALES), stored(stem + MINIMA), scheme["group_size"])
    return sum_of_terms(values, scheme.get("terms", 1))
