"""AWQ (Lin et al. 2023, arXiv 2306.00978): scale channels by what activates them, clip ranges, round to nearest.

The scaling is `transforms.awq`'s. A second walk through the scaled, unquantized model gives the second moments that
each group's range is clipped by. Every matrix is judged on the original's activations, so no error is carried on.
"""

import re
from pathlib import Path

import torch

from yardstick.models.config import ModelConfig
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.gptq import error_report
from yardstick.quantize.grid import Grid, round_to_nearest
from yardstick.quantize.pack import dequantize
from yardstick.quantize.scales import clipped_ranges, rounded
from yardstick.quantize.transforms.awq import layer_moments, transform
from yardstick.quantize.transforms.folded import HEAD
from yardstick.sources.base import TensorSource


def quantize_model(
    source: TensorSource, config: ModelConfig, recipe: dict, writer: PackedWriter, calibration: Path
) -> list[str]:
    """Write all shards of the checkpoint, going on after those that are there; returns their names."""
    source, config = transform(source, config, recipe, recipe, writer, calibration)
    keep = re.compile(recipe["keep_bf16"]) if recipe["keep_bf16"] else None
    shards = [*(f"layer-{layer:05d}" for layer in range(config.num_layers)), "rest"]
    if all(map(writer.has_shard, shards)):
        return shards
    matrices = {*config.body_matrices(), HEAD}
    for layer, stages, weights in layer_moments(source, config, calibration, "awq"):
        shard = shards[-1 if layer is None else layer]
        if writer.has_shard(shard):
            continue
        hessians = {f"{matrix}.weight": moments.hessian for names, moments in stages.items() for matrix in names}
        if layer is None:
            names = {name: name for name in (config.embedding_name, config.final_norm_name, HEAD)}
        else:
            names = {config.layer_name(layer, short): short for short in config.layer_tensors(layer)}
        for name, short in names.items():
            if name not in matrices:
                writer.add_plain(name, source.get(name))
            elif keep and keep.search(name):
                writer.add_kept(name, source.get(name))
            else:
                add_matrix(writer, name, weights[short], hessians[short].mean(name), recipe)
        writer.finish_shard(shard)
    return shards


def add_matrix(writer: PackedWriter, name: str, weights: torch.Tensor, hessian: torch.Tensor, recipe: dict) -> None:
    """Quantize one fp32 matrix [out, in] under the second moments of its input, and report its errors."""
    grid = Grid(recipe["group_size"])
    nearest = round_to_nearest(weights, grid)
    codes, scales, minima = nearest
    if recipe["clip"]:
        scales, minima = clipped_ranges(weights, hessian, grid)
        codes, scales, minima = rounded(weights, scales, minima, grid), scales.bfloat16(), minima.bfloat16()
    restored, plain = (dequantize(*parts, grid.group_size) for parts in ((codes, scales, minima), nearest))
    report = error_report(weights, restored, plain, hessian)
    writer.add_quantized(name, codes, scales, minima, grid.group_size, report)
