"""The transformer block, as a generator that stops before each group of matrices.

A plain forward runs the generator to its end. A quantizer stops at each yield, sees the input that the group's
matrices share, may replace their weights, and goes on: sequential quantization in one pass, with no second copy of
the forward. Arithmetic follows Hugging Face's modules: norms and rotary angles in fp32, the rest in the weights' type.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from yardstick.models.attention import attention_stages
from yardstick.models.config import ATTENTION, DELTA, ModelConfig
from yardstick.models.delta_net import delta_net_stages
from yardstick.models.parts import Rotary, Stages, Weights, linear, linears, norm
from yardstick.models.state import BatchState, LayerState

GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
MIXERS = {ATTENTION: attention_stages, DELTA: delta_net_stages}


def block_stages(
    hidden: torch.Tensor,
    weights: Weights,
    config: ModelConfig,
    kind: str,
    rotary: Rotary,
    state: LayerState | BatchState | None = None,
) -> Stages:
    """One layer of some kind over hidden states [batch, length, hidden].

    Yields (names of the matrices that come next, the input they share); `weights` is read after each yield, so a
    caller may change it in between. Returns the layer's output. With a state the positions come after those that the
    state has seen, and are added to it; `rotary` is the table of all positions.
    """
    length = hidden.shape[1]
    normed = norm(hidden, weights["input_layernorm.weight"], config)
    hidden = hidden + (yield from MIXERS[kind](normed, weights, config, rotary, state))
    normed = norm(hidden, weights["post_attention_layernorm.weight"], config)
    yield GATE_UP, normed
    gate, up = linears(normed, weights, GATE_UP)
    gated = F.silu(gate, inplace=True).mul_(up)
    del normed, gate, up
    yield ("mlp.down_proj",), gated
    if state:
        state.advance(length)
    return hidden + linear(gated, weights, "mlp.down_proj")


def run_block(
    hidden: torch.Tensor,
    weights: Weights,
    config: ModelConfig,
    kind: str,
    rotary: Rotary,
    state: LayerState | BatchState | None = None,
    on_stage: Callable[[tuple[str, ...], torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """One layer, start to end; `on_stage` sees what the block stops for."""
    stages = block_stages(hidden, weights, config, kind, rotary, state)
    while True:
        try:
            names, inputs = next(stages)
        except StopIteration as stop:
            return stop.value
        if on_stage:
            on_stage(names, inputs)
        del inputs


def decode_block(
    hidden: torch.Tensor, weights: Weights, config: ModelConfig, kind: str, rotary: Rotary, start: int
) -> torch.Tensor:
    """As `run_block`, but from `start` on one position at a time, from the state that the ones before left.

    This is what generation does to a known text. It may be done layer by layer, since a layer's input at a position
    depends on nothing after it.
    """
    state = LayerState(hidden.shape[1])
    parts = [run_block(hidden[:, :start], weights, config, kind, rotary, state)]
    for position in range(start, hidden.shape[1]):
        parts.append(run_block(hidden[:, position : position + 1], weights, config, kind, rotary, state))
    return torch.cat(parts, dim=1)
