"""The transformer block, as a generator that stops before each group of matrices.

A plain forward runs the generator to its end. A quantizer stops at each yield, sees the input that the group's
matrices share, may replace their weights, and goes on: sequential quantization in one pass, with no second copy of
the forward. Arithmetic follows Hugging Face's modules: norms and rotary angles in fp32, the rest in the weights' type.
"""

import torch
import torch.nn.functional as F

from yardstick.models.attention import attention_stages
from yardstick.models.config import ATTENTION, DELTA, ModelConfig
from yardstick.models.delta_net import delta_net_stages
from yardstick.models.parts import Rotary, Stages, Weights, linear, norm

MIXERS = {ATTENTION: attention_stages, DELTA: delta_net_stages}


def block_stages(hidden: torch.Tensor, weights: Weights, config: ModelConfig, kind: str, rotary: Rotary) -> Stages:
    """One layer of some kind over hidden states [batch, length, hidden].

    Yields (names of the matrices that come next, the input they share); `weights` is read after each yield, so a
    caller may change it in between. Returns the layer's output.
    """
    normed = norm(hidden, weights["input_layernorm.weight"], config)
    hidden = hidden + (yield from MIXERS[kind](normed, weights, config, rotary))
    normed = norm(hidden, weights["post_attention_layernorm.weight"], config)
    yield ("mlp.gate_proj", "mlp.up_proj"), normed
    gated = F.silu(linear(normed, weights, "mlp.gate_proj"), inplace=True).mul_(linear(normed, weights, "mlp.up_proj"))
    del normed
    yield ("mlp.down_proj",), gated
    return hidden + linear(gated, weights, "mlp.down_proj")


def run_block(hidden: torch.Tensor, weights: Weights, config: ModelConfig, kind: str, rotary: Rotary) -> torch.Tensor:
    """One layer, start to end."""
    stages = block_stages(hidden, weights, config, kind, rotary)
    while True:
        try:
            next(stages)
        except StopIteration as stop:
            return stop.value
