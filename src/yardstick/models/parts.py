"""Pieces that all kinds of layers share: linear, norm, rotary embedding."""

from collections.abc import Generator, Mapping

import torch
import torch.nn.functional as F

from yardstick.models.config import ModelConfig

Weights = Mapping[str, torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]
Stages = Generator[tuple[tuple[str, ...], torch.Tensor], None, torch.Tensor]


def linear(inputs: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """inputs @ W^T, plus the bias where the family has one."""
    return F.linear(inputs, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def normalize(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in fp32."""
    hidden = hidden.float()
    mean_square = torch.linalg.vecdot(hidden, hidden) / hidden.shape[-1]
    return hidden * torch.rsqrt(mean_square + eps).unsqueeze(-1)


def norm(hidden: torch.Tensor, gain: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Root-mean-square norm with the family's gain: w, or 1 + w in fp32 where w is centred on zero."""
    normed = normalize(hidden, config.rms_norm_eps)
    if config.zero_centred_norm:
        return (normed * (1.0 + gain.float())).to(hidden.dtype)
    return gain * normed.to(hidden.dtype)


def rotary_table(config: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> Rotary:
    """Cosine and sine [length, rotary_dim / 2] of position * theta^(-2i / rotary_dim), computed in fp32."""
    width = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    angles = torch.arange(length, device=device).float()[:, None] / (config.rope_theta**exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the two halves of the first rotary_dim entries of each head: states [batch, heads, length, head_dim]."""
    cos, sin = rotary
    width = 2 * cos.shape[-1]
    first, second = states[..., :width].chunk(2, dim=-1)
    rest = [states[..., width:]] if width < states.shape[-1] else []
    return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], dim=-1)
