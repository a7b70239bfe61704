"""Quantize a model to trellis codes on the walk of GPTQ: every matrix sees the outputs of those quantized before."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from yardstick.models.config import ModelConfig
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.hessian import Hessian
from yardstick.quantize.pack import pack_nibbles
from yardstick.quantize.run_gptq import GptqRun, walk
from yardstick.quantize.trellis import TILE_ROWS, tile_counts
from yardstick.quantize.trellis_search import TrellisCodes, quantize_trellis
from yardstick.sources.base import TensorSource
from yardstick.sources.packed import SCALES
from yardstick.sources.trellis import TRELLIS, decode_trellis

COMPARED_GROUP = 128  # of the round-to-nearest that errors are put beside


class TrellisRun(GptqRun):
    """State of one run."""

    def __init__(self, recipe: dict, writer: PackedWriter) -> None:
        super().__init__(recipe | {"group_size": COMPARED_GROUP, "mse": False}, writer)

    def quantize_together(self, names: list[str], matrices: list[torch.Tensor], hessian: Hessian) -> list[torch.Tensor]:
        """Quantize matrices that share an input as one, each padded to whole tiles; adds them to the shard and returns
        them decoded."""
        mean, state_bits = hessian.mean(names[0]), self.recipe["state_bits"]
        padded = [torch.nn.functional.pad(m.float(), (0, 0, 0, -len(m) % TILE_ROWS)) for m in matrices]
        result = quantize_trellis(torch.cat(padded), mean, state_bits, self.recipe["damping"], names[0])
        if result.damping != self.recipe["damping"]:
            print(f"{names[0]}: damping raised to {result.damping:g}", file=sys.stderr)
        outputs, tile = [], 0
        for name, matrix in zip(names, matrices, strict=True):
            parts, scheme = encoded(result, matrix.shape, state_bits, tile)
            tile += len(parts[TRELLIS])
            stored = {name.removesuffix(".weight") + end: part for end, part in parts.items()}
            restored = decode_trellis(stored.__getitem__, name, scheme)
            report = self.errors(name, matrix.float(), restored, mean) | {"damping": result.damping}
            self.writer.add_encoded(name, parts, scheme, report)
            outputs.append(restored)
        return outputs

    @staticmethod
    def decode(stored: Callable[[str], torch.Tensor], name: str, scheme: dict) -> torch.Tensor:
        return decode_trellis(stored, name, scheme)


def encoded(codes: TrellisCodes, shape: tuple[int, int], state_bits: int, tile: int = 0) -> tuple[dict, dict]:
    """Stored tensors, by the ends of their names, and scheme of the matrix whose rows begin at a tile."""
    symbols, first = codes.symbols[tile : tile + tile_counts(shape)[0]], tile * TILE_ROWS
    packed = pack_nibbles(symbols.flatten(0, 1)).view(*symbols.shape[:2], -1)
    parts = {TRELLIS: packed, SCALES: codes.scales[first : first + shape[0]]}
    return parts, {"shape": list(shape), "state_bits": state_bits}


def quantize_model(
    source: TensorSource, config: ModelConfig, recipe: dict, writer: PackedWriter, calibration: Path
) -> list[str]:
    """Write all shards of the checkpoint, going on after those that are there; returns their names."""
    return walk(TrellisRun(recipe, writer), source, config, calibration)
