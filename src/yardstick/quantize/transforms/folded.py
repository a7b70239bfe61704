"""A source whose tensors are another's, changed by a rule of the transform; what all transforms share."""

from dataclasses import replace

import torch

from yardstick.models.config import ModelConfig
from yardstick.sources.base import LazyRows, TensorInfo, TensorSource

HEAD = "lm_head.weight"
INPUT_NORM, MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
# matrices that read a norm of their layer, whichever of them its mixer has; in_proj_a and in_proj_b are not quantized
READERS = {
    INPUT_NORM: (
        *(f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")),
        *(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "a", "b")),
    ),
    MLP_NORM: ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
NORM_OF = {matrix: norm for norm, matrices in READERS.items() for matrix in matrices}


class FoldedSource(TensorSource):
    """Tensors of `source` changed by `fold`, in the stored type of each, so that a packed checkpoint is one of the same
    architecture and a resumed run sees what the first one stored.

    The output head is a tensor of its own, whether or not the original's is: what is folded into it is not in the
    embedding. These two are also read by rows, so `fold` may be given some of theirs.
    """

    def __init__(self, source: TensorSource, config: ModelConfig) -> None:
        super().__init__(source.path)
        self.source, self.config = source, config
        self._layers = {
            config.layer_name(layer, short): (layer, short)
            for layer in range(config.num_layers)
            for short in config.layer_tensors(layer)
        }
        self._infos = dict(source.infos())
        self._infos[HEAD] = source.infos()[config.head_name]

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def ignored(self) -> dict[str, str]:
        return self.source.ignored()

    def _stored_name(self, name: str) -> str:
        return self.config.head_name if name == HEAD else name

    def read(self, name: str) -> torch.Tensor:
        tensor = self.source.get(self._stored_name(name))
        return self.fold(name, *self._layers.get(name, (None, name)), tensor)

    def rows(self, name: str) -> torch.Tensor | LazyRows:
        if name not in (self.config.embedding_name, HEAD):
            return self.get(name)
        rows = self.source.rows(self._stored_name(name))
        return LazyRows(self, name, lambda start, stop: self.fold(name, None, name, rows[start:stop]))

    def fold(self, name: str, layer: int | None, short: str, tensor: torch.Tensor) -> torch.Tensor:
        """The transformed tensor, in the type of `tensor`; `layer` is None for embedding, final norm and head."""
        raise NotImplementedError

    def gain(self, name: str) -> torch.Tensor:
        """fp32 factors that a norm of the original applies: its tensor, or 1 + it where it is centred on zero."""
        tensor = self.source.get(name).float()
        return 1.0 + tensor if self.config.zero_centred_norm else tensor


def untied(config: ModelConfig) -> ModelConfig:
    """The same model with an output head of its own."""
    return replace(config, tied_head=False)
