"""Quantize a model with refined GPTQ: fitted ranges and codes, and targets that make up for the errors before.

As in `run_gptq` calibration sequences are walked through the blocks once and every matrix sees the outputs of the
quantized matrices before it. With `drift` a second stream of hidden states goes through the original matrices beside
it: what a matrix should give is what the original one gives of the original's input. Output errors in the record are
those to that target, RTN's too.
"""

import sys
from pathlib import Path

import torch

from yardstick.corpora.load import load_calibration
from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig
from yardstick.models.layers import block_stages, run_block
from yardstick.models.parts import Stages, linear, norm, rotary_table
from yardstick.models.prefill import embed, load_layer, pick_device
from yardstick.progress import progress
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.drift import Drift
from yardstick.quantize.gptq import error_report
from yardstick.quantize.grid import Grid, round_to_nearest
from yardstick.quantize.pack import dequantize
from yardstick.quantize.refine import fit
from yardstick.quantize.run_gptq import SEQUENCES_AT_ONCE, GptqRun, batches_of, stored_layer
from yardstick.sources.base import TensorSource

LAST_STAGE = ("mlp.down_proj",)


class RefinedRun(GptqRun):
    """State of one run: recipe, writer and device."""

    def __init__(self, recipe: dict, writer: PackedWriter) -> None:
        super().__init__(recipe | {"mse": False, "act_order": True}, writer)

    def quantize_drifted(self, names: list[str], matrices: list[torch.Tensor], drift: Drift) -> list[torch.Tensor]:
        """Quantize matrices that share an input as one; adds them to the shard and returns them dequantized, fp32."""
        size, damping, what = self.grid.group_size, self.recipe["damping"], names[0]
        weights = torch.cat([matrix.float() for matrix in matrices])
        target, strength = drift.target(weights, what)
        hessian = drift.hessian(what)
        found = fit(target, hessian, self.grid, damping, self.recipe["rounds"], what)
        if found.damping != damping:
            print(f"{what}: damping raised to {found.damping:g}", file=sys.stderr)
        codes, scales, minima = found.codes, found.scales, found.minima
        restored = dequantize(codes, scales, minima, size)
        nearest = dequantize(*round_to_nearest(weights, Grid(size)), size)
        start = 0
        for name, matrix in zip(names, matrices, strict=True):
            rows = slice(start, start + len(matrix))
            start += len(matrix)
            report = error_report(weights[rows], restored[rows], nearest[rows], hessian, target[rows])
            report |= {"damping": found.damping, "drift_strength": strength}
            self.writer.add_quantized(name, codes[rows], scales[rows], minima[rows], size, report)
        return list(restored.split([len(matrix) for matrix in matrices]))


def quantize_model(
    source: TensorSource, config: ModelConfig, recipe: dict, writer: PackedWriter, calibration: Path
) -> list[str]:
    """Write all shards of the checkpoint, going on after those that are there; returns their names."""
    device, dtype = pick_device(), torch.float32
    run = RefinedRun(recipe, writer)
    input_ids = load_calibration(calibration)
    if len(input_ids) <= SEQUENCES_AT_ONCE:
        raise YardstickError(
            f"{calibration}: {len(input_ids)} calibration sequences; gptq-refined needs more than {SEQUENCES_AT_ONCE},"
            " to check on one half of them what it learns from the other"
        )
    hidden = embed(source, config, input_ids, dtype, device)
    original = hidden.clone() if recipe["drift"] else None
    rotary = rotary_table(config, input_ids.shape[1], device, dtype)
    shards = [f"layer-{i:05d}" for i in range(config.num_layers)]
    with progress("refined gptq", input_ids.numel(), passes=config.num_layers) as done:
        for layer, shard in enumerate(shards):
            exact = load_layer(source, config, layer, dtype, device)
            if writer.has_shard(shard):
                weights = stored_layer(run, shard, config, layer, device)
                for states, matrices in ((original, exact), (hidden, weights)):
                    for batch in batches_of(states) if states is not None else ():
                        states[batch] = run_block(states[batch], matrices, config, config.layer_kind(layer), rotary)
            else:
                quantize_layer(run, source, config, layer, exact, original, hidden, rotary)
                writer.finish_shard(shard)
            done(input_ids.numel())
    shards.append("rest")
    if not writer.has_shard("rest"):
        quantize_rest(run, source, config, original, hidden)
        writer.finish_shard("rest")
    return shards


def advance(stages: Stages, states: torch.Tensor) -> tuple[tuple[str, ...], torch.Tensor | None]:
    """The next stop of a block: names of matrices and their input; at its end no names, and its output in `states`."""
    try:
        return next(stages)
    except StopIteration as stop:
        states.copy_(stop.value)
        return (), None


def quantize_layer(
    run: RefinedRun, source, config: ModelConfig, layer: int, exact, original: torch.Tensor | None, hidden, rotary
) -> None:
    """Quantize one layer stage by stage; both streams of hidden states are replaced by the layer's outputs."""
    kind, weights = config.layer_kind(layer), dict(exact)
    walks = []
    for batch in batches_of(hidden):
        ours = block_stages(hidden[batch], weights, config, kind, rotary)
        theirs = None if original is None else block_stages(original[batch], exact, config, kind, rotary)
        walks.append((batch, ours, theirs))
    residual = original - hidden if original is not None and run.recipe["residual"] else None
    quantized = set()
    while True:
        drift, names, inputs = None, (), []
        for batch, ours, theirs in walks:
            reached, after = advance(ours, hidden[batch])
            before = advance(theirs, original[batch])[1] if theirs else None
            if not reached:
                continue
            names, drift = reached, drift or Drift(after.shape[-1], after.device)
            if residual is not None and len(names) == 1 and len(exact[f"{names[0]}.weight"]) == config.hidden_size:
                drift.add(after, before, residual[batch])
                inputs.append((batch, after, before))
            else:
                drift.add(after, before)
            del after, before
        if drift is None:
            break
        chosen = [f"{n}.weight" for n in names if not run.kept(config.layer_name(layer, f"{n}.weight"))]
        if chosen:
            full = [config.layer_name(layer, name) for name in chosen]
            weights.update(
                zip(chosen, run.quantize_drifted(full, [exact[name] for name in chosen], drift), strict=True)
            )
            quantized.update(chosen)
        if names != LAST_STAGE:  # nothing of the layer reads the stream after it
            for batch, after, before in inputs:
                residual[batch] += linear(before, exact, names[0]) - linear(after, weights, names[0])
    run.add_unquantized(source, config, layer, quantized)


def quantize_rest(run: RefinedRun, source: TensorSource, config: ModelConfig, original, hidden) -> None:
    """The output head on final-normed states; embedding and final norm as they are."""
    head = run.head_to_quantize(source, config)
    if head is None:
        return
    gain = source.get(config.final_norm_name).to(device=hidden.device, dtype=hidden.dtype)
    drift = Drift(hidden.shape[-1], hidden.device)
    for batch in batches_of(hidden):
        before = None if original is None else norm(original[batch], gain, config)
        drift.add(norm(hidden[batch], gain, config), before)
    run.quantize_drifted(["lm_head.weight"], [head.to(hidden.device)], drift)
