"""Rotate the residual stream (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456; R1 of SpinQuant, arXiv 2405.16406).

A norm without a gain commutes with a rotation: norm(x R) = norm(x) R. So each gain g is folded into the matrices that
read it and becomes 1, and with hidden states x R in place of x

    embedding E -> E R,   a matrix that reads a norm W -> W diag(g) R,   one that writes to the stream W -> R^T W

leave every logit as it is. With `heads` the values of each head are rotated too (R2), from the rows of v_proj and its
bias to the columns of o_proj. A gate on the head's output does not commute with that, so gated attention and delta
nets keep their values as they are; norms inside a head (q_norm, k_norm, a delta net's own) are never touched.
"""

from pathlib import Path

import torch

from yardstick.models.config import ATTENTION, ModelConfig
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.transforms.folded import HEAD, NORM_OF, READERS, FoldedSource, untied
from yardstick.quantize.transforms.hadamard import Rotation
from yardstick.sources.base import TensorSource

WRITERS = {"self_attn.o_proj.weight", "linear_attn.out_proj.weight", "mlp.down_proj.weight"}


class RotatedSource(FoldedSource):
    """The rotated model; gains are folded and rotated away in every layer of every family."""

    def __init__(self, source: TensorSource, config: ModelConfig, seed: int, heads: bool) -> None:
        super().__init__(source, config)
        self._stream = Rotation(config.hidden_size, seed)
        self._values = Rotation(config.head_dim, seed + 1) if heads and not config.gated_attention else None

    def fold(self, name: str, layer: int | None, short: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == self.config.final_norm_name or short in READERS:
            return torch.full_like(tensor, 0.0 if self.config.zero_centred_norm else 1.0)
        if name == self.config.embedding_name:
            return self._stream.of_columns(tensor).to(tensor.dtype)
        values = self._values if layer is not None and self.config.layer_kind(layer) == ATTENTION else None
        folded = tensor.float()
        if name == HEAD:
            folded = self._stream.of_columns(folded * self.gain(self.config.final_norm_name))
        elif short in NORM_OF:
            folded = self._stream.of_columns(folded * self.gain(self.config.layer_name(layer, NORM_OF[short])))
        if values and short in ("self_attn.v_proj.weight", "self_attn.v_proj.bias"):
            folded = values.of_rows(folded) if folded.ndim == 2 else values.of_columns(folded)
        if values and short == "self_attn.o_proj.weight":
            folded = values.of_columns(folded)
        if short in WRITERS:
            folded = self._stream.of_rows(folded)
        return folded.to(tensor.dtype)


def transform(
    source: TensorSource,
    config: ModelConfig,
    settings: dict,
    recipe: dict,
    writer: PackedWriter,
    calibration: Path | None,
) -> tuple[TensorSource, ModelConfig]:
    """The rotated model; it takes no text."""
    return RotatedSource(source, config, settings["seed"], settings["heads"]), untied(config)
