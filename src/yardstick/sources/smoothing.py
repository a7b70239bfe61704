"""Factors that smoothing moved inside a model: from a norm into the matrices that read it, or between two matrices.

AWQ (Lin et al. 2023, arXiv 2306.00978) and SmoothQuant scale a channel down where it leaves one tensor and up where
the next one reads it. The model computes the same, but neither tensor resembles the original's until that is undone.
"""

import torch

from yardstick.models.config import ModelConfig
from yardstick.models.prefill import head_name
from yardstick.sources.base import TensorSource
from yardstick.sources.detective import (
    EXPLAINED,
    FITTED,
    PLAIN,
    channel_factors,
    gain,
    relative_error,
    smoothing_factors,
)

GATED_NORM = "linear_attn.norm.weight"
# matrices that read the output of a layer's norms, whichever of them its mixer has
AFTER_NORM = {
    "input_layernorm.weight": (
        *(f"self_attn.{part}_proj" for part in ("q", "k", "v")),
        *(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "a", "b")),
    ),
    GATED_NORM: ("linear_attn.out_proj",),
    "post_attention_layernorm.weight": ("mlp.gate_proj", "mlp.up_proj"),
}
# no norm stands between these two, and a channel passes from the rows of one to the columns of the other as it is
AFTER_MATRIX = {"self_attn.v_proj": "self_attn.o_proj", "mlp.up_proj": "mlp.down_proj"}


def norm_factors(
    source: TensorSource, original: TensorSource, config: ModelConfig, layer: int | None
) -> dict[str, torch.Tensor | None]:
    """Factors s [in] of the matrices that read a norm of this layer that the candidate changed, by full name.

    With the original's input x such a matrix Ŵ does what Ŵ diag(1 / s) does. `layer` None stands for the final norm
    and the output head. A matrix whose norm is unchanged is not there; None is one whose factors cannot be told,
    because a gain is zero in only one of the two checkpoints.
    """
    if layer is None:
        norms = {config.final_norm_name: (head_name(source, config),)}
    else:
        norms = {
            config.layer_name(layer, norm): tuple(config.layer_name(layer, f"{matrix}.weight") for matrix in readers)
            for norm, readers in AFTER_NORM.items()
        }
    found: dict[str, torch.Tensor | None] = {}
    for norm, readers in norms.items():
        if norm not in source.infos() or norm not in original.infos():
            continue
        gated = norm.endswith(GATED_NORM)  # its gain is w itself in every family, and all value heads share it
        zero_centred = config.zero_centred_norm and not gated
        own, base = source.get(norm), original.get(norm)
        if torch.equal(gain(own, zero_centred), gain(base, zero_centred)):
            continue
        factors = smoothing_factors(own, base, zero_centred)
        if gated and factors is not None:
            factors = factors.repeat(config.delta.value_heads)
        found |= dict.fromkeys(readers, factors)
    return found


def fitted_rows(candidate: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """Factors f [out] such that the candidate is the original diag(f) W, quantized; None where no such factors are.

    Nothing in the checkpoint tells them, so they are the least-squares ones, and taken only where they explain most of
    the difference: rounding alone does not look like a factor of whole rows.
    """
    error = relative_error(candidate, base)
    if min(base.shape) < FITTED or error <= PLAIN:
        return None
    factors = channel_factors(candidate, base, 0)
    if factors is None or relative_error(candidate / factors.unsqueeze(1), base) >= EXPLAINED * error:
        return None
    return factors


def rows_as_columns(factors: torch.Tensor, after: str, config: ModelConfig) -> torch.Tensor:
    """Factors of a matrix's rows for the columns of the matrix `after` it: a value head serves several query heads."""
    if after != "self_attn.o_proj":
        return factors
    heads = factors.view(config.num_kv_heads, config.head_dim)
    return heads.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0).flatten()
