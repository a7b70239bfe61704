"""The multi-token prediction head of a Qwen3.5 checkpoint (`mtp.*`), as a draft for `speculate`.

It predicts the id after the next one. With h_t the model's hidden state at position t after the model's final norm, and
e(x) the model's embedding of an id x,

    z_t = block(fc [norm_e(e(x_{t+1})), norm_h(h_t)]),   g_t = norm(z_t),   logits of x_{t+2} = head g_t

with the model's own output head and block a layer of gated full attention at the positions t, as in the model. All
norms have the gain 1 + w. For further ids g_t takes the place of h_{t+1}. The definition is that of vLLM's
`Qwen3_5MultiTokenPredictor` (qwen3_5_mtp.py), whose model hands on the states behind its final norm (qwen3_next.py) and
whose drafter leaves the positions of the hidden states as they are (spec_decode). llama.cpp took the states before the
norm at first and corrected it (its pull request 24025: more drafts are accepted), as LightLLM did (1402).
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from yardstick.errors import YardstickError
from yardstick.models.config import ATTENTION, ModelConfig
from yardstick.models.generate import Model
from yardstick.models.layers import run_block
from yardstick.models.parts import Weights, norm, rotary_table
from yardstick.models.state import LayerState
from yardstick.sources.base import TensorSource

PREFIX, LAYER = "mtp.", "layers.0."
FAMILY = "qwen3_5_text"
PLAIN = {"bf16", "f16", "f32"}


def head_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors of the head without their prefix, name to shape: a layer of attention and four of its own."""
    hidden = config.hidden_size
    block = replace(config, layer_kinds=(ATTENTION,)).layer_tensors(0)
    return {f"{LAYER}{name}": shape for name, shape in block.items()} | {
        "fc.weight": (hidden, 2 * hidden),
        "norm.weight": (hidden,),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,),
    }


def load_prediction_head(
    source: TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The head's tensors without their prefix, in the compute type.

    The evaluation does not measure them, so a source may hold them in any form: only plain floats are taken here.

    Raises:
        YardstickError: the source has no such head, or one that differs from the definition above.
    """
    infos, expected = source.infos(), head_tensors(config)
    held = {name.removeprefix(PREFIX) for name in infos if name.startswith(PREFIX)}
    if config.family != FAMILY or not held:
        raise YardstickError(
            f"{source.path}: has no multi-token prediction head of Qwen3.5 ({PREFIX}* tensors); draft by prompt lookup"
        )
    for names, fault in ((set(expected) - held, "is missing"), (held - set(expected), "is not known")):
        if names:
            raise YardstickError(f"{source.path}: tensor {PREFIX}{min(names)} of the prediction head {fault}")
    for name, shape in expected.items():
        info = infos[PREFIX + name]
        if info.shape != shape or info.scheme not in PLAIN:
            raise YardstickError(
                f"{source.path}: tensor {PREFIX}{name} is {info.scheme} {list(info.shape)}; the prediction head asks "
                f"for plain floats {list(shape)}"
            )
    return {name: source.get(PREFIX + name).to(device=device, dtype=dtype) for name in expected}


class HeadDraft:
    """Drafts for one text with the model's own prediction head; the state is one layer of keys and values."""

    def __init__(self, model: Model, weights: Weights, capacity: int) -> None:
        self.model, self.weights, self.state = model, weights, LayerState(capacity)
        self._layer = {name.removeprefix(LAYER): w for name, w in weights.items() if name.startswith(LAYER)}
        self._rotary = rotary_table(model.config, capacity, model.device, model.dtype)

    def __call__(self, ids: list[int], hidden: torch.Tensor, most: int) -> list[int]:
        """The ids that the head takes for the next ones; see `speculate.Draft`."""
        known = self.state.length + len(hidden)
        following, hidden, guesses = ids[-len(hidden) :], hidden[None], []
        for _ in range(most):
            hidden = self.states(torch.tensor([following]), hidden)[:, -1:]
            guesses.append(int(self.model.head_logits(hidden[0, -1]).argmax()))
            following = guesses[-1:]
        self.state.rewind(known)  # what comes of guesses is replaced by what comes of the model's own hidden states
        return guesses

    def states(self, following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """g [1, length, hidden] of the next ids [1, length] and h [1, length, hidden], added to the state."""
        config, weights = self.model.config, self.weights
        embedded = self.model.embedding[following.to(self.model.device)]
        both = (
            norm(embedded, weights["pre_fc_norm_embedding.weight"], config),
            norm(hidden, weights["pre_fc_norm_hidden.weight"], config),
        )
        mixed = F.linear(torch.cat(both, dim=-1), weights["fc.weight"])
        mixed = run_block(mixed, self._layer, config, ATTENTION, self._rotary, self.state)
        return norm(mixed, weights["norm.weight"], config)
