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
from yardstick.quantize.trellis_search import quantize_trellis
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
        packed = pack_nibbles(result.symbols.flatten(0, 1)).view(*result.symbols.shape[:2], -1)
        outputs, tile = [], 0
        for name, matrix in zip(names, matrices, strict=True):
            tiles = slice(tile, tile + tile_counts(matrix.shape)[0])
            stem, scheme = name.removesuffix(".weight"), {"shape": list(matrix.shape), "state_bits": state_bits}
            first = tile * TILE_ROWS
            parts = {TRELLIS: packed[tiles], SCALES: result.scales[first : first + len(matrix)]}
            restored = decode_trellis({stem + end: part for end, part in parts.items()}.__getitem__, name, scheme)
            report = self.errors(name, matrix.float(), restored, mean) | {"damping": result.damping}
            self.writer.add_encoded(name, parts, scheme, report)
            outputs.append(restored)
            tile = tiles.stop
        return outputs

    @staticmethod
    def decode(stored: Callable[[str], torch.Tensor], name: str, scheme: dict) -> torch.Tensor:
        return decode_trellis(stored, name, scheme)


def quantize_model(
    source: TensorSource, config: ModelConfig, recipe: dict, writer: PackedWriter, calibration: Path
) -> list[str]:
    """Write all shards of the checkpoint, going on after those that are there; returns their names."""
    return walk(TrellisRun(recipe, writer), source, config, calibration)
