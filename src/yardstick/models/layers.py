"""The transformer block, as a generator that stops before each group of matrices.

A plain forward runs the generator to its end. A quantizer stops at each yield, sees the input that the group's
matrices share, may replace their weights, and goes on: sequential quantization in one pass, with no second copy of
the forward. Arithmetic follows Hugging Face's modules: norms and rotary angles in fp32, the rest in the weights' type.
"""

from collections.abc import Generator, Mapping

import torch
import torch.nn.functional as F

from yardstick.models.config import ModelConfig

Weights = Mapping[str, torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]


def rms_norm(hidden: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32: x / sqrt(mean(x^2) + eps) * gain."""
    dtype = hidden.dtype
    hidden = hidden.float()
    mean_square = torch.linalg.vecdot(hidden, hidden) / hidden.shape[-1]
    normed = hidden * torch.rsqrt(mean_square + eps).unsqueeze(-1)
    return gain * normed.to(dtype)


def rotary_table(config: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> Rotary:
    """Cosine and sine [length, head_dim / 2] of position * theta^(-2i / head_dim), computed in fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
    angles = torch.arange(length, device=device).float()[:, None] / (config.rope_theta**exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the halves of each head: states [batch, heads, length, head_dim]."""
    cos, sin = rotary
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def linear(inputs: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """inputs @ W^T, plus the bias where the family has one."""
    return F.linear(inputs, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attention_context(normed: torch.Tensor, weights: Weights, config: ModelConfig, rotary: Rotary) -> torch.Tensor:
    """Causal grouped-query attention up to the input of o_proj: [batch, length, heads * head_dim]."""
    batch, length, _ = normed.shape

    def heads(name: str, count: int, norm: str | None = None) -> torch.Tensor:
        states = linear(normed, weights, f"self_attn.{name}").view(batch, length, count, config.head_dim)
        if norm and config.qk_norm:
            states = rms_norm(states, weights[f"self_attn.{norm}.weight"], config.rms_norm_eps)
        return states.transpose(1, 2)

    query = apply_rotary(heads("q_proj", config.num_heads, "q_norm"), rotary)
    key = apply_rotary(heads("k_proj", config.num_kv_heads, "k_norm"), rotary)
    value = heads("v_proj", config.num_kv_heads)
    repeats = config.num_heads // config.num_kv_heads
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return context.transpose(1, 2).reshape(batch, length, -1)


def block_stages(
    hidden: torch.Tensor, weights: Weights, config: ModelConfig, rotary: Rotary
) -> Generator[tuple[tuple[str, ...], torch.Tensor], None, torch.Tensor]:
    """One layer over hidden states [batch, length, hidden].

    Yields (names of the matrices that come next, the input they share); `weights` is read after each yield, so a
    caller may change it in between. Returns the layer's output.
    """
    normed = rms_norm(hidden, weights["input_layernorm.weight"], config.rms_norm_eps)
    yield ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), normed
    context = attention_context(normed, weights, config, rotary)
    del normed
    yield ("self_attn.o_proj",), context
    hidden = hidden + linear(context, weights, "self_attn.o_proj")
    del context
    normed = rms_norm(hidden, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
    yield ("mlp.gate_proj", "mlp.up_proj"), normed
    gated = F.silu(linear(normed, weights, "mlp.gate_proj"), inplace=True).mul_(linear(normed, weights, "mlp.up_proj"))
    del normed
    yield ("mlp.down_proj",), gated
    return hidden + linear(gated, weights, "mlp.down_proj")


def run_block(hidden: torch.Tensor, weights: Weights, config: ModelConfig, rotary: Rotary) -> torch.Tensor:
    """One layer, start to end."""
    stages = block_stages(hidden, weights, config, rotary)
    while True:
        try:
            next(stages)
        except StopIteration as stop:
            return stop.value
