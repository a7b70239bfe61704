"""Quantize a model with GPTQ, sequentially: every matrix sees the outputs of the matrices quantized before it.

Calibration sequences are walked through the blocks once. At each stage of a block (see `models.layers.block_stages`)
the shared input gives the Hessian, the matrices of the stage are quantized, and the walk goes on with the quantized
weights. The output head comes last, on the final-normed states.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from yardstick.corpora.load import load_calibration
from yardstick.models.config import ModelConfig
from yardstick.models.layers import block_stages, run_block
from yardstick.models.parts import norm, rotary_table
from yardstick.models.prefill import embed, load_layer, pick_device
from yardstick.progress import progress
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.gptq import error_report, gptq
from yardstick.quantize.grid import Grid, round_to_nearest
from yardstick.quantize.hessian import Hessian
from yardstick.quantize.pack import dequantize
from yardstick.sources.base import TensorSource
from yardstick.sources.packed import decode_matrix

SEQUENCES_AT_ONCE = 4


class GptqRun:
    """State of one run: recipe, writer and device."""

    def __init__(self, recipe: dict, writer: PackedWriter) -> None:
        self.recipe, self.writer = recipe, writer
        self.grid = Grid(recipe["group_size"], recipe["mse"])
        self.keep = re.compile(recipe["keep_bf16"]) if recipe["keep_bf16"] else None

    def kept(self, name: str) -> bool:
        """Whether the recipe leaves this matrix in bf16."""
        return bool(self.keep and self.keep.search(name))

    def quantize_together(self, names: list[str], matrices: list[torch.Tensor], hessian: Hessian) -> list[torch.Tensor]:
        """Quantize matrices that share an input as one; adds them to the shard and returns them dequantized."""
        mean = hessian.mean(names[0])
        stacked = torch.cat([matrix.float() for matrix in matrices])
        result = gptq(stacked, mean, self.grid, self.recipe["act_order"], self.recipe["damping"], names[0])
        if result.damping != self.recipe["damping"]:
            print(f"{names[0]}: damping raised to {result.damping:g}", file=sys.stderr)
        restored = dequantize(result.codes, result.scales, result.minima, self.grid.group_size)
        outputs, start = [], 0
        for name, matrix in zip(names, matrices, strict=True):
            rows = slice(start, start + len(matrix))
            start += len(matrix)
            report = self.errors(name, stacked[rows], restored[rows], mean) | {"damping": result.damping}
            self.writer.add_quantized(
                name, result.codes[rows], result.scales[rows], result.minima[rows], self.grid.group_size, report
            )
            outputs.append(restored[rows])
        return outputs

    def errors(self, name: str, weights: torch.Tensor, restored: torch.Tensor, mean: torch.Tensor) -> dict[str, float]:
        """Errors of a quantized matrix beside those of round-to-nearest, for the checkpoint's record."""
        nearest = dequantize(*round_to_nearest(weights, Grid(self.grid.group_size)), self.grid.group_size)
        report = error_report(weights, restored, nearest, mean)
        error, nearest_error = report["output_error"], report["output_error_rtn"]
        if error >= nearest_error:
            print(
                f"{name}: output error {error:.4g} is not below round-to-nearest's {nearest_error:.4g}",
                file=sys.stderr,
            )
        return report

    def add_unquantized(self, source: TensorSource, config: ModelConfig, layer: int, quantized: set[str]) -> None:
        """Add what a layer holds beside the matrices that were quantized, given by their short names."""
        for name in config.layer_tensors(layer):
            if name not in quantized:
                tensor = source.get(config.layer_name(layer, name))
                is_kept = name.removesuffix(".weight") in config.layer_linears(layer)
                add = self.writer.add_kept if is_kept else self.writer.add_plain
                add(config.layer_name(layer, name), tensor)

    def head_to_quantize(self, source: TensorSource, config: ModelConfig) -> torch.Tensor | None:
        """Add embedding and final norm as they are; gives the output head, or adds it where the recipe keeps it."""
        for name in (config.embedding_name, config.final_norm_name):
            self.writer.add_plain(name, source.get(name))
        head = source.get(config.head_name)
        if not self.kept("lm_head.weight"):
            return head
        self.writer.add_kept("lm_head.weight", head, config.tied_head)
        return None

    @staticmethod
    def decode(stored: Callable[[str], torch.Tensor], name: str, scheme: dict) -> torch.Tensor:
        """A matrix of a finished shard as `quantize_together` returned it."""
        return decode_matrix(stored, name, scheme)


def quantize_model(
    source: TensorSource, config: ModelConfig, recipe: dict, writer: PackedWriter, calibration: Path
) -> list[str]:
    """Write all shards of the checkpoint, going on after those that are there; returns their names."""
    return walk(GptqRun(recipe, writer), source, config, calibration)


def walk(run: GptqRun, source: TensorSource, config: ModelConfig, calibration: Path) -> list[str]:
    """The walk of `quantize_model`, with the method that `run` has for matrices that share an input."""
    device, dtype, writer = pick_device(), torch.float32, run.writer
    input_ids = load_calibration(calibration)
    hidden = embed(source, config, input_ids, dtype, device)
    rotary = rotary_table(config, input_ids.shape[1], device, dtype)
    shards = [f"layer-{i:05d}" for i in range(config.num_layers)]
    with progress(run.recipe["method"], input_ids.numel(), passes=config.num_layers) as done:
        for layer, shard in enumerate(shards):
            if writer.has_shard(shard):
                weights = stored_layer(run, shard, config, layer, device)
                for batch in batches_of(hidden):
                    hidden[batch] = run_block(hidden[batch], weights, config, config.layer_kind(layer), rotary)
            else:
                weights = load_layer(source, config, layer, dtype, device)
                hidden = quantize_layer(run, source, config, layer, weights, hidden, rotary)
                writer.finish_shard(shard)
            done(input_ids.numel())
    shards.append("rest")
    if not writer.has_shard("rest"):
        quantize_rest(run, source, config, hidden)
        writer.finish_shard("rest")
    return shards


def batches_of(states: torch.Tensor) -> list[slice]:
    """Slices of a few sequences at a time."""
    return [slice(start, start + SEQUENCES_AT_ONCE) for start in range(0, len(states), SEQUENCES_AT_ONCE)]


def quantize_layer(
    run: GptqRun, source, config: ModelConfig, layer: int, weights: dict, hidden, rotary
) -> torch.Tensor:
    """Quantize one layer stage by stage; returns its output on the calibration sequences."""
    batches = [
        block_stages(hidden[batch], weights, config, config.layer_kind(layer), rotary) for batch in batches_of(hidden)
    ]
    names_of_quantized = set()
    while True:
        outputs, hessian, names = [], None, ()
        for batch in batches:
            try:
                names, inputs = next(batch)
            except StopIteration as stop:
                outputs.append(stop.value)
                continue
            hessian = hessian or Hessian(inputs.shape[-1], inputs.device)
            hessian.add(inputs)
            del inputs
        if hessian is None:
            break
        chosen = [name for name in names if not run.kept(config.layer_name(layer, f"{name}.weight"))]
        if chosen:
            restored = run.quantize_together(
                [config.layer_name(layer, f"{name}.weight") for name in chosen],
                [weights[f"{name}.weight"] for name in chosen],
                hessian,
            )
            for name, matrix in zip(chosen, restored, strict=True):
                weights[f"{name}.weight"] = matrix
                names_of_quantized.add(f"{name}.weight")
    run.add_unquantized(source, config, layer, names_of_quantized)
    return torch.cat(outputs)


def quantize_rest(run: GptqRun, source: TensorSource, config: ModelConfig, hidden: torch.Tensor) -> None:
    """The output head on final-normed states; embedding and final norm as they are."""
    head = run.head_to_quantize(source, config)
    if head is None:
        return
    gain = source.get(config.final_norm_name).to(device=hidden.device, dtype=hidden.dtype)
    hessian = Hessian(hidden.shape[-1], hidden.device)
    hessian.add(norm(hidden, gain, config))
    run.quantize_together(["lm_head.weight"], [head.to(hidden.device)], hessian)


def stored_layer(run: GptqRun, shard: str, config: ModelConfig, layer: int, device) -> dict[str, torch.Tensor]:
    """A finished layer as the quantizer left it: fp32 under short names."""
    tensors, schemes = run.writer.read_shard(shard)
    weights = {}
    for short in config.layer_tensors(layer):
        name = config.layer_name(layer, short)
        encoded = name in schemes
        value = run.decode(tensors.__getitem__, name, schemes[name]) if encoded else tensors[name].float()
        weights[short] = value.to(device)
    return weights
