"""Activation-aware scaling (AWQ, Lin et al. 2023, arXiv 2306.00978), folded into what comes before a matrix.

Channels that matrices share as their input get factors s: the columns of the matrices are multiplied by s, and what
the channels come from is divided by it:

    q, k, v and a delta net's projections <- input norm        gate, up <- the MLP's norm        head <- final norm
    o_proj <- rows of v_proj                                   down <- rows of up_proj
    a delta net's out_proj <- its gated norm

All of it is exact: a gate multiplies channel by channel, and a value head that several query heads read gives them
one factor, as do the heads that share a delta net's gated norm. A gain is rounded to its stored type first and the
columns get what that left of s. Factors come from the original's activations on the calibration sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from yardstick.corpora.load import load_calibration
from yardstick.models.config import ModelConfig
from yardstick.models.layers import run_block
from yardstick.models.parts import norm, rotary_table
from yardstick.models.prefill import embed, load_layer, pick_device
from yardstick.progress import progress
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.grid import Grid
from yardstick.quantize.hessian import Hessian
from yardstick.quantize.scales import find_scales
from yardstick.quantize.transforms.folded import (
    HEAD,
    INPUT_NORM,
    MLP_NORM,
    NORM_OF,
    FoldedSource,
    untied,
)
from yardstick.sources.base import TensorSource

SEQUENCES_AT_ONCE = 4
GATED_NORM, VALUES, UP = "linear_attn.norm.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight"
# the first matrix of a stage of the block -> the tensor of the layer that its input channels come from
ORIGIN = {
    "self_attn.q_proj": INPUT_NORM,
    "linear_attn.in_proj_qkv": INPUT_NORM,
    "self_attn.o_proj": VALUES,
    "linear_attn.out_proj": GATED_NORM,
    "mlp.gate_proj": MLP_NORM,
    "mlp.down_proj": UP,
}
# matrix -> where its columns' factors come from; and what is divided by them row by row
COLUMNS = NORM_OF | {f"{first}.weight": origin for first, origin in ORIGIN.items()}
ROWS = {VALUES: VALUES, "self_attn.v_proj.bias": VALUES, UP: UP}


def channels_of_columns(origin: str, config: ModelConfig) -> torch.Tensor:
    """The channel of `origin` that each column of the matrices behind it reads, int64 [in]."""
    if origin == VALUES:
        heads = torch.arange(config.num_kv_heads * config.head_dim).view(config.num_kv_heads, config.head_dim)
        return heads.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0).flatten()
    if origin == GATED_NORM:
        return torch.arange(config.delta.value_dim).repeat(config.delta.value_heads)
    return torch.arange(config.intermediate_size if origin == UP else config.hidden_size)


def divided_gain(tensor: torch.Tensor, scales: torch.Tensor, zero_centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's tensor for its gain over `scales`, in its own type, and fp32 factors for the columns behind it.

    A gain that is zero, or would be rounded to it, stays as it is with a factor of 1.
    """
    shift = 1.0 if zero_centred else 0.0
    gain = tensor.float() + shift
    divided = (gain / scales - shift).to(tensor.dtype)
    left = divided.float() + shift
    usable = (left != 0) & (gain != 0)
    return torch.where(usable, divided, tensor), torch.where(usable, gain / left, torch.ones_like(gain))


class ScaledSource(FoldedSource):
    """The scaled model: `scales` holds the factors of channels by the full name of the tensor that they come from."""

    def __init__(self, source: TensorSource, config: ModelConfig, scales: dict[str, torch.Tensor]) -> None:
        super().__init__(source, config)
        self._scales = scales

    def fold(self, name: str, layer: int | None, short: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 1 and name in self._scales:
            return self._divided(name)[0]
        folded = tensor.float()
        if name == HEAD:
            folded = folded * self._column_factors(self.config.final_norm_name, self.config.final_norm_name)
        if short in COLUMNS and layer is not None:
            origin = COLUMNS[short]
            folded = folded * self._column_factors(self.config.layer_name(layer, origin), origin)
        if short in ROWS and layer is not None:
            scales = self._scales.get(self.config.layer_name(layer, ROWS[short]))
            if scales is not None:
                folded = folded / (scales.unsqueeze(1) if folded.ndim == 2 else scales)
        return folded.to(tensor.dtype)

    def _divided(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        zero_centred = self.config.zero_centred_norm and not name.endswith(GATED_NORM)
        return divided_gain(self.source.get(name), self._scales[name], zero_centred)

    def _column_factors(self, name: str, origin: str) -> torch.Tensor | float:
        if name not in self._scales:
            return 1.0
        factors = self._scales[name] if origin in (VALUES, UP) else self._divided(name)[1]
        return factors[channels_of_columns(origin, self.config)]


@dataclass
class Moments:
    """What calibration says of one input: second moments, and the mean of |x| of each channel."""

    hessian: Hessian
    magnitude: torch.Tensor

    @classmethod
    def of(cls, features: int, device: torch.device) -> "Moments":
        """Nothing seen yet."""
        return cls(Hessian(features, device), torch.zeros(features, device=device))

    def add(self, inputs: torch.Tensor) -> None:
        """Take in inputs [..., features]."""
        self.hessian.add(inputs)
        self.magnitude += inputs.abs().float().flatten(0, -2).sum(0)


def layer_moments(
    source: TensorSource, config: ModelConfig, calibration: Path, what: str
) -> Iterator[tuple[int | None, dict[tuple[str, ...], Moments], dict[str, torch.Tensor]]]:
    """(layer, moments of each stage's input by the names of its matrices, the layer's fp32 weights) of the model as it
    is, on the calibration sequences; at last (None, moments of the head's input, the head)."""
    device, dtype = pick_device(), torch.float32
    input_ids = load_calibration(calibration)
    hidden = embed(source, config, input_ids, dtype, device)
    rotary = rotary_table(config, input_ids.shape[1], device, dtype)
    batches = [slice(start, start + SEQUENCES_AT_ONCE) for start in range(0, len(hidden), SEQUENCES_AT_ONCE)]
    with progress(what, input_ids.numel(), passes=config.num_layers) as done:
        for layer in range(config.num_layers):
            weights, moments = load_layer(source, config, layer, dtype, device), {}

            def see(names, inputs, moments=moments) -> None:
                if names not in moments:
                    moments[names] = Moments.of(inputs.shape[-1], device)
                moments[names].add(inputs)

            for batch in batches:
                hidden[batch] = run_block(
                    hidden[batch], weights, config, config.layer_kind(layer), rotary, on_stage=see
                )
            yield layer, moments, weights
            done(input_ids.numel())
    gain, moments = source.get(config.final_norm_name).to(device, dtype), Moments.of(config.hidden_size, device)
    for batch in batches:
        moments.add(norm(hidden[batch], gain, config))
    stem = HEAD.removesuffix(".weight")
    yield None, {(stem,): moments}, {HEAD: source.get(config.head_name).to(device, dtype)}


def transform(
    source: TensorSource,
    config: ModelConfig,
    settings: dict,
    recipe: dict,
    writer: PackedWriter,
    calibration: Path | None,
) -> tuple[TensorSource, ModelConfig]:
    """The scaled model. Factors are kept beside the checkpoint until it is finished, a shard for each layer, so that a
    run that was stopped need not search again."""
    shards = [*(f"scales-{layer:05d}" for layer in range(config.num_layers)), "scales-rest"]
    if not all(map(writer.has_shard, shards)):
        feedback, grid = recipe.get("damping"), Grid(recipe["group_size"])
        for layer, stages, weights in layer_moments(source, config, calibration, "scales"):
            shard = shards[-1 if layer is None else layer]
            if writer.has_shard(shard):
                continue
            for names, moments in stages.items():
                origin = config.final_norm_name if layer is None else ORIGIN[names[0]]
                name = origin if layer is None else config.layer_name(layer, origin)
                tokens = moments.hessian.tokens
                scales = find_scales(
                    [weights[f"{matrix}.weight"] for matrix in names],
                    moments.hessian.mean(name),
                    moments.magnitude / tokens,
                    channels_of_columns(origin, config).to(moments.magnitude.device),
                    grid,
                    settings["steps"],
                    feedback,
                    name,
                )
                writer.add_plain(name, scales)
            writer.finish_shard(shard)
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        found |= writer.read_shard(shard)[0]
    return ScaledSource(source, config, found), untied(config)
