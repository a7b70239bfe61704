"""Causal grouped-query attention: plain, with biases, with query and key norms, with an output gate."""

import torch
import torch.nn.functional as F

from yardstick.models.config import ModelConfig
from yardstick.models.parts import Rotary, Stages, Weights, apply_rotary, linear, linears, norm
from yardstick.models.state import BatchState, LayerState

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def attention_stages(
    normed: torch.Tensor, weights: Weights, config: ModelConfig, rotary: Rotary, state: LayerState | BatchState | None
) -> Stages:
    """Stages of the attention of one block, on normed states [batch, length, hidden]; see `layers.block_stages`."""
    yield QKV, normed
    context = attention_context(normed, weights, config, rotary, state)
    del normed
    yield ("self_attn.o_proj",), context
    return linear(context, weights, "self_attn.o_proj")


def attention_context(
    normed: torch.Tensor, weights: Weights, config: ModelConfig, rotary: Rotary, state: LayerState | BatchState | None
) -> torch.Tensor:
    """Attention up to the input of o_proj: [batch, length, heads * head_dim]."""
    batch, length, _ = normed.shape
    here = tuple(table[state.positions(length)] if state else table[:length] for table in rotary)

    query, key, value = (states.unflatten(-1, (-1, config.head_dim)) for states in linears(normed, weights, QKV))

    def rotated(states: torch.Tensor, gain: str) -> torch.Tensor:
        if config.qk_norm:
            states = norm(states, weights[f"self_attn.{gain}.weight"], config)
        return apply_rotary(states.transpose(1, 2), here)

    gate = None
    if config.gated_attention:  # each head's rows are its query, then its gate
        query, gate = query[:, :, 0::2], query[:, :, 1::2]
    query = rotated(query, "q_norm")
    key, value = rotated(key, "k_norm"), value.transpose(1, 2)
    if state:
        key, value = state.extend(key, value)
    context = attend(query, key, value, state.mask if state else None).transpose(1, 2)
    if gate is not None:
        context = context * torch.sigmoid(gate)
    return context.reshape(batch, length, -1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of queries [batch, heads, length, head_dim], which are the last `length` positions of the keys.

    torch's kernel works by blocks: no [length, length] matrix is held, whatever the length. A single query looks at
    all keys, with `mask` [batch, 1, 1, keys] added to its scores.
    """
    batch, count, length, width = query.shape
    repeats = count // key.shape[1]
    if length == 1:  # the heads that share a key are rows of one product, and all of the past is seen
        grouped = query.reshape(batch, key.shape[1], repeats, width)
        return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask).reshape(batch, count, 1, width)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    past = key.shape[2] - length
    if past == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    seen = torch.ones(length, past + length, dtype=torch.bool, device=query.device).tril(past)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
