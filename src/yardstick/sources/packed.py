"""Source `packed:`: our own checkpoints, int4 with a bf16 scale and a bf16 minimum per group of input columns."""

from collections.abc import Callable
from pathlib import Path

import torch

from yardstick.errors import YardstickError
from yardstick.files import read_json, sha256_file
from yardstick.quantize.pack import dequantize, unpack_nibbles
from yardstick.sources.base import TensorInfo, TensorSource
from yardstick.sources.hf import SafetensorsReader, checkpoint_files

CODES, SCALES, MINIMA = ".weight_codes", ".weight_scales", ".weight_minima"


class PackedSource(TensorSource):
    """Quantized tensors dequantized to fp32; the rest as stored. Group sizes come from the checkpoint's index."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        index = read_json(self.path / "model.safetensors.index.json")
        try:
            self._schemes: dict[str, dict] = index["metadata"]["yardstick"]["tensors"]
        except (KeyError, TypeError):
            raise YardstickError(
                f"{path}: the index holds no yardstick packing metadata; is it a packed: checkpoint?"
            ) from None
        for name, digest in index["metadata"]["yardstick"].get("sha256", {}).items():
            if (self.path / name).is_file() and sha256_file(self.path / name) != digest:
                raise YardstickError(f"{self.path / name}: is not the shard that its index was written for")
        self._reader = SafetensorsReader(checkpoint_files(self.path))
        self._infos = {}
        consumed = set()
        for name, scheme in self._schemes.items():
            stem = name.removesuffix(".weight")
            parts = [stem + CODES, stem + SCALES, stem + MINIMA]
            for part in parts:
                if part not in self._reader.headers:
                    raise YardstickError(f"{path}: tensor {part} is missing")
            consumed.update(parts)
            bits = sum(self._reader.stored_bits(part) for part in parts)
            self._infos[name] = TensorInfo(tuple(scheme["shape"]), f"int4-g{scheme['group_size']}", bits)
        for name, header in self._reader.headers.items():
            if name not in consumed:
                self._infos[name] = TensorInfo(
                    tuple(header["shape"]), header["dtype"].lower(), self._reader.stored_bits(name)
                )

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> torch.Tensor:
        if name not in self._schemes:
            return self._reader.tensor(name)
        return decode_matrix(self._reader.tensor, name, self._schemes[name])


def decode_matrix(stored: Callable[[str], torch.Tensor], name: str, scheme: dict) -> torch.Tensor:
    """fp32 values [out, in] of one packed matrix; `stored` gives a stored tensor by its name."""
    stem = name.removesuffix(".weight")
    codes = unpack_nibbles(stored(stem + CODES), scheme["shape"][1])
    return dequantize(codes, stored(stem + SCALES), stored(stem + MINIMA), scheme["group_size"])
