"""Source `trellis:`: our own checkpoints of trellis codes (`quantize/trellis.py`), in the original's basis."""

from collections.abc import Callable

import torch

from yardstick.errors import YardstickError
from yardstick.quantize.trellis import CODEBOOKS, SEQUENCE, TILE_ROWS, dequantize, tile_counts
from yardstick.sources.packed import SCALES, PackedSource, is_shape

TRELLIS = ".weight_trellis"


class TrellisSource(PackedSource):
    """Quantized tensors decoded to fp32; the rest as stored."""

    @staticmethod
    def label(scheme: dict) -> str:
        return f"trellis4-s{scheme['state_bits']}"

    def wanted(self, name: str, scheme: object) -> tuple[dict[str, tuple[str, list[int]]], str]:
        shape, bits = (scheme.get("shape"), scheme.get("state_bits")) if isinstance(scheme, dict) else (None, None)
        if not (is_shape(shape) and type(bits) is int and bits in CODEBOOKS):
            raise YardstickError(
                f"{self.path}: tensor {name}: the index names no shape [out, in] and state_bits of "
                f"{', '.join(map(str, CODEBOOKS))}; is it a trellis: checkpoint?"
            )
        tiles = [*tile_counts(shape), SEQUENCE // 2]
        return {TRELLIS: ("U8", tiles), SCALES: ("BF16", shape[:1])}, f"{shape} as a trellis"

    def _read_rows(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        if name not in self.schemes:
            return super()._read_rows(name, start, stop)
        scheme = self.schemes[name]
        start, stop, _ = slice(start, stop).indices(scheme["shape"][0])
        top = start // TILE_ROWS

        def stored(part: str) -> torch.Tensor:
            if part.endswith(TRELLIS):
                return self.reader.tensor(part, top, -(-stop // TILE_ROWS))
            return self.reader.tensor(part, top * TILE_ROWS, stop)

        return decode_trellis(stored, name, scheme)[start - top * TILE_ROWS :]


def decode_trellis(stored: Callable[[str], torch.Tensor], name: str, scheme: dict) -> torch.Tensor:
    """fp32 values [out, in] of one matrix, or of some of its rows; `stored` gives a stored tensor by name."""
    stem = name.removesuffix(".weight")
    return dequantize(stored(stem + TRELLIS), stored(stem + SCALES), scheme["shape"][1], scheme["state_bits"])
