"""Pieces that all kinds of layers share: linear, norm, rotary embedding."""

from collections.abc import Callable, Generator, Mapping, Sequence

import torch
import torch.nn.functional as F

from yardstick.models.config import ModelConfig

# a matrix is a tensor, or what multiplies by one; those that the engine has joined have their names with `+` between
Weights = Mapping[str, torch.Tensor | Callable]
Rotary = tuple[torch.Tensor, torch.Tensor]
Stages = Generator[tuple[tuple[str, ...], torch.Tensor], None, torch.Tensor]


def linear(inputs: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """inputs @ W^T, plus the bias where the family has one."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if isinstance(weight, torch.Tensor):
        return F.linear(inputs, weight, bias)
    return weight(inputs) if bias is None else weight(inputs) + bias


def linears(inputs: torch.Tensor, weights: Weights, names: Sequence[str]) -> list[torch.Tensor]:
    """`linear` for each of several names, in one product where the engine has joined them."""
    joined = weights.get("+".join(names))
    if joined is None:
        return [linear(inputs, weights, name) for name in names]
    biases = [weights.get(f"{name}.bias") for name in names]
    outs = joined(inputs)
    return [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]


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
    """Cosine and sine [length, rotary_dim / 2] of position * frequency, computed in fp32."""
    angles = torch.arange(length, device=device).float()[:, None] * rotary_frequencies(config).to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """theta^(-2i / rotary_dim), fp32 [rotary_dim / 2], stretched as Llama 3.1 does where the config says so.

    Llama 3.1: frequencies whose wave is longer than original / low_freq_factor are divided by the factor, those whose
    wave is shorter than original / high_freq_factor stay, and between the two it goes over linearly.
    """
    width, scaling = config.rotary_dim or config.head_dim, config.rope_scaling
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    plain = 1.0 / (config.rope_theta**exponents)
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * torch.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / scaling.factor + share * plain


def apply_rotary(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the two halves of the first rotary_dim entries of each head: states [batch, heads, length, head_dim]."""
    cos, sin = rotary
    width = 2 * cos.shape[-1]
    first, second = states[..., :width].chunk(2, dim=-1)
    rest = [states[..., width:]] if width < states.shape[-1] else []
    return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], dim=-1)
