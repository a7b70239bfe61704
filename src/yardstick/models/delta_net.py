"""Gated delta net (Yang et al. 2024, arXiv 2412.06464), as in Qwen3.5: linear attention with a decaying state.

For each head, with query q, key k (both of unit length), value v, decay a = exp(g) and write strength beta:

    S_t = a_t S_{t-1} + k_t (beta_t (v_t - a_t S_{t-1}^T k_t))^T,   o_t = S_t^T q_t / sqrt(key_dim)

`recurrent_delta_rule` is this definition, one position at a time (decode). `chunked_delta_rule` gives the same for
many positions at once (prefill): inside a chunk the writes depend on each other through a unit triangular system.
All of it is fp32 whatever the weights are.
"""

import torch
import torch.nn.functional as F

from yardstick.models.config import ModelConfig
from yardstick.models.parts import Rotary, Stages, Weights, linear, normalize
from yardstick.models.state import BatchState, LayerState

CHUNK = 64
UNIT_EPS = 1e-6


def delta_net_stages(
    normed: torch.Tensor, weights: Weights, config: ModelConfig, rotary: Rotary, state: LayerState | BatchState | None
) -> Stages:
    """Stages of the delta net of one block, on normed states [batch, length, hidden]; positions need no rotary."""
    yield ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), normed
    output = delta_net_output(normed, weights, config, state)
    del normed
    yield ("linear_attn.out_proj",), output
    return linear(output, weights, "linear_attn.out_proj")


def delta_net_output(
    normed: torch.Tensor, weights: Weights, config: ModelConfig, state: LayerState | BatchState | None
) -> torch.Tensor:
    """The delta net up to the input of out_proj: [batch, length, value_heads * value_dim]."""
    shape, (batch, length, _) = config.delta, normed.shape
    projected = linear(normed, weights, "linear_attn.in_proj_qkv")
    mixed, window = causal_convolution(projected, weights["linear_attn.conv1d.weight"], state.window if state else None)
    mixed = F.silu(mixed)
    query, key, value = mixed.split((shape.keys, shape.keys, shape.values), dim=-1)
    query = unit_length(query.reshape(batch, length, shape.key_heads, shape.key_dim))
    key = unit_length(key.reshape(batch, length, shape.key_heads, shape.key_dim))
    value = value.reshape(batch, length, shape.value_heads, shape.value_dim).float()
    repeats = shape.value_heads // shape.key_heads
    query, key = query.repeat_interleave(repeats, dim=2), key.repeat_interleave(repeats, dim=2)

    beta = torch.sigmoid(linear(normed, weights, "linear_attn.in_proj_b")).float()
    step = F.softplus(linear(normed, weights, "linear_attn.in_proj_a").float() + weights["linear_attn.dt_bias"].float())
    log_decay = -weights["linear_attn.A_log"].float().exp() * step
    before, memories = state.memory if state else None, []
    if length == 1 or (state and state.trail is not None):
        states, memory = recurrent_delta_rule(query, key, value, log_decay, beta, before, memories)
    else:
        states, memory = chunked_delta_rule(query, key, value, log_decay, beta, before)
    if state:
        if state.trail is not None:
            state.trail = list(zip(windows(projected, window, state.window), memories, strict=True))
        state.window, state.memory = window, memory

    gate = linear(normed, weights, "linear_attn.in_proj_z").view(states.shape)
    # the gated norm's gain is w itself, unlike the 1 + w of the block's norms
    states = weights["linear_attn.norm.weight"] * normalize(states.to(normed.dtype), config.rms_norm_eps).to(
        normed.dtype
    )
    return (states * F.silu(gate.float())).to(normed.dtype).reshape(batch, length, -1)


def causal_convolution(
    inputs: torch.Tensor, kernel: torch.Tensor, window: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel of [batch, length, channels] through its own kernel [channels, 1, width], looking back only.

    `window` holds the width - 1 inputs before the first, zeros if left out. Returns the outputs and the next window.
    """
    channels, _, width = kernel.shape
    if window is None:
        window = inputs.new_zeros(len(inputs), width - 1, channels)
    padded = torch.cat((window, inputs), dim=1)
    outputs = F.conv1d(padded.transpose(1, 2), kernel, groups=channels).transpose(1, 2)
    return outputs, padded[:, padded.shape[1] - (width - 1) :].clone()


def windows(inputs: torch.Tensor, last: torch.Tensor, before: torch.Tensor | None) -> list[torch.Tensor]:
    """The window after each of inputs [batch, length, channels], of which `last` is the last; `before` is that before.

    All are [batch, width - 1, channels]; without `before` it is zeros.
    """
    padded = torch.cat((torch.zeros_like(last) if before is None else before, inputs), dim=1)
    return [padded[:, t + 1 : t + 1 + last.shape[1]] for t in range(inputs.shape[1])]


def unit_length(states: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in fp32."""
    states = states.float()
    return states * torch.rsqrt(torch.linalg.vecdot(states, states) + UNIT_EPS).unsqueeze(-1)


def recurrent_delta_rule(
    query, key, value, log_decay, beta, state=None, states: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one position at a time.

    Args:
        query, key: fp32 [batch, length, heads, key_dim], of unit length.
        value: fp32 [batch, length, heads, value_dim].
        log_decay, beta: fp32 [batch, length, heads]; log_decay <= 0.
        state: [batch, heads, key_dim, value_dim] from earlier positions, or None.
        states: is given the state after each position, where a list is passed.

    Returns:
        outputs [batch, length, heads, value_dim] and the last state.
    """
    state = _initial_state(key, value) if state is None else state
    outputs = []
    for t in range(query.shape[1]):
        state = state * log_decay[:, t, :, None, None].exp()
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = beta[:, t, :, None] * (value[:, t] - known)
        state = state + key[:, t, :, :, None] * change[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * query.shape[-1] ** -0.5)
        if states is not None:
            states.append(state)
    return torch.stack(outputs, dim=1), state


def chunked_delta_rule(query, key, value, log_decay, beta, state=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `recurrent_delta_rule`, by chunks of 64 positions; a last chunk may be short.

    With G the running sum of log_decay inside a chunk and D_ij = exp(G_i - G_j) for j <= i, the writes u solve
    (I + tril(beta k k^T * D, -1)) u = beta (v - exp(G) k S), and the outputs are exp(G) q S + (q k^T * D) u.
    """
    state = _initial_state(key, value) if state is None else state
    query = query * query.shape[-1] ** -0.5
    outputs = []
    for start in range(0, query.shape[1], CHUNK):
        # [batch, heads, chunk, ...]
        q, k, v = (x[:, start : start + CHUNK].transpose(1, 2) for x in (query, key, value))
        b = beta[:, start : start + CHUNK].transpose(1, 2).unsqueeze(-1)
        total = log_decay[:, start : start + CHUNK].transpose(1, 2).cumsum(dim=-1)
        span = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).tril()
        # masked before the exponential: above the diagonal it would overflow
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~span, -torch.inf).exp()
        since_start = total.exp().unsqueeze(-1)
        system = (k @ k.transpose(-1, -2)) * decay * b
        target = b * (v - since_start * (k @ state))
        writes = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        outputs.append(since_start * (q @ state) + ((q @ k.transpose(-1, -2)) * decay) @ writes)
        until_end = (total[..., -1:] - total).exp().unsqueeze(-1)
        state = state * total[..., -1, None, None].exp() + (k * until_end).transpose(-1, -2) @ writes
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def _initial_state(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    batch, _, heads, key_dim = key.shape
    return torch.zeros(batch, heads, key_dim, value.shape[-1], device=key.device)
