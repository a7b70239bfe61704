"""Source `packed:`: our own checkpoints, int4 with a bf16 scale and a bf16 minimum per group of input columns."""

from collections.abc import Callable
from pathlib import Path

import torch

from yardstick.errors import YardstickError
from yardstick.files import read_json
from yardstick.quantize.pack import dequantize, unpack_nibbles
from yardstick.sources.base import LazyRows, TensorInfo, TensorSource
from yardstick.sources.safetensors_file import SafetensorsReader, checkpoint_files

CODES, SCALES, MINIMA = ".weight_codes", ".weight_scales", ".weight_minima"


class PackedSource(TensorSource):
    """Quantized tensors dequantized to fp32; the rest as stored. Group sizes come from the checkpoint's index."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        index = read_json(self.path / "model.safetensors.index.json")
        try:
            self.schemes: dict[str, dict] = index["metadata"]["yardstick"]["tensors"]
        except (KeyError, TypeError):
            raise YardstickError(
                f"{path}: the index holds no yardstick packing metadata; is it a packed: checkpoint?"
            ) from None
        self.reader = SafetensorsReader(checkpoint_files(self.path), index["metadata"]["yardstick"].get("sha256"))
        self._infos = {}
        consumed = set()
        for name, scheme in self.schemes.items():
            stem = name.removesuffix(".weight")
            parts = [stem + CODES, stem + SCALES, stem + MINIMA]
            for part in parts:
                if part not in self.reader.headers:
                    raise YardstickError(f"{path}: tensor {part} is missing")
            consumed.update(parts)
            bits = sum(self.reader.stored_bits(part) for part in parts)
            self._infos[name] = TensorInfo(tuple(scheme["shape"]), f"int4-g{scheme['group_size']}", bits)
        for name, header in self.reader.headers.items():
            if name not in consumed:
                self._infos[name] = TensorInfo(
                    tuple(header["shape"]), header["dtype"].lower(), self.reader.stored_bits(name)
                )

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> torch.Tensor:
        return self._read_rows(name, 0, None)

    def rows(self, name: str) -> LazyRows:
        return LazyRows(self, name, lambda start, stop: self._read_rows(name, start, stop))

    def _read_rows(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        def stored(part: str) -> torch.Tensor:
            return self.reader.tensor(part, start, stop)

        return decode_matrix(stored, name, self.schemes[name]) if name in self.schemes else stored(name)


def decode_matrix(stored: Callable[[str], torch.Tensor], name: str, scheme: dict) -> torch.Tensor:
    """fp32 values [out, in] of one packed matrix, or of some of its rows; `stored` gives a stored tensor by name."""
    stem = name.removesuffix(".weight")
    codes = unpack_nibbles(stored(stem + CODES), scheme["shape"][1])
    return dequantize(codes, stored(stem + SCALES), stored(stem + MINIMA), scheme["group_size"])
