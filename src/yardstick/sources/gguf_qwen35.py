"""Architecture `qwen35` of GGUF files (Qwen3.5): names, and what llama.cpp's converter does to the tensors.

- Value heads are tiled over key heads: with r = value heads / key heads, head j of the file is the original's head
  r * (j mod key heads) + j div key heads. This holds for the value part of attn_qkv and of the convolution's channels,
  for attn_gate, ssm_alpha, ssm_beta, ssm_a, ssm_dt, and for the columns of ssm_out.
- Gains of zero-centred norms are stored as 1 + w; the gated norm ssm_norm is not one of them.
- ssm_a is -exp(A_log). The convolution has lost its axis of one input channel.
- Layers for multi-token prediction follow the model's own and count in block_count.

Query and key heads keep their order, and rows of the attention are not permuted. Source: conversion/qwen.py of
llama.cpp (pull request 19468), whose own forward our tests compare with.
"""

import re
from collections.abc import Callable
from functools import partial

import torch

from yardstick.errors import YardstickError
from yardstick.sources.gguf_file import GgufFile

Undo = Callable[[torch.Tensor], torch.Tensor]

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
TOP_NAMES = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
ZERO_CENTRED = {
    f"{name}.weight" for name in ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
}
# dimension along which the value heads lie, and whether query and key heads come before them
TILED = {
    "attn_qkv.weight": (0, True),
    "ssm_conv1d.weight": (0, True),
    "attn_gate.weight": (0, False),
    "ssm_alpha.weight": (0, False),
    "ssm_beta.weight": (0, False),
    "ssm_a": (0, False),
    "ssm_dt.bias": (0, False),
    "ssm_out.weight": (1, False),
}
BLOCK_NAME = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
PREDICTION = "multi-token prediction layer, not measured"


def untile_value_heads(tensor: torch.Tensor, key_heads: int, value_heads: int, dim: int = 0) -> torch.Tensor:
    """The file's order of value heads to Hugging Face's, in which the heads of one key head are neighbours."""
    heads = tensor.unflatten(dim, (value_heads // key_heads, key_heads, -1))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


class Qwen35Layout:
    """Names and changes of the tensors of one file.

    Raises:
        YardstickError: the numbers of heads in the metadata are missing, or do not fit each other.
    """

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.path, self.prefix = file.path, prefix
        self.layers = file.number("qwen35.block_count") - file.number("qwen35.nextn_predict_layers", 0)
        self.key_heads = file.number("qwen35.ssm.group_count")
        self.value_heads = file.number("qwen35.ssm.time_step_rank")
        key_width = file.number("qwen35.ssm.state_size")
        if min(self.key_heads, self.value_heads, key_width) < 1 or self.value_heads % self.key_heads:
            raise YardstickError(
                f"{self.path}: {self.value_heads} value heads, {self.key_heads} key heads of width {key_width}: no fit"
            )
        # a key of Ollama's converter; llama.cpp's always tiles
        if not file.value("qwen35.ssm.v_head_reordered", True):
            raise YardstickError(f"{self.path}: its value heads are not tiled (ssm.v_head_reordered), not supported")
        self.keys = 2 * self.key_heads * key_width

    def place(self, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], Undo | None] | None:
        """Hugging Face name and shape of a tensor, and what undoes its changes; None where we know no name.

        Raises:
            YardstickError: the shape does not fit the number of heads.
        """
        block = BLOCK_NAME.fullmatch(name)
        short = block[2] if block else name
        if name == "output.weight":
            known = "lm_head.weight"
        elif name in TOP_NAMES:
            known = self.prefix + TOP_NAMES[name]
        elif block and short in LAYER_NAMES:
            known = f"{self.prefix}layers.{block[1]}.{LAYER_NAMES[short]}"
        else:
            return None
        if short in TILED:
            dim, after_keys = TILED[short]
            values = shape[dim] - self.keys * after_keys if len(shape) > dim else 0
            if values < 1 or values % self.value_heads:
                raise YardstickError(
                    f"{self.path}: tensor {name} has shape {list(shape)}, which does not fit {self.key_heads} key and "
                    f"{self.value_heads} value heads"
                )
        if short == "ssm_conv1d.weight":
            shape = (shape[0], 1, *shape[1:])
        return known, shape, partial(self.undo, short) if short in ZERO_CENTRED | TILED.keys() else None

    def undo(self, short: str, values: torch.Tensor) -> torch.Tensor:
        """The original's values of a tensor `short` (its name without the layer) from those of the file."""
        if short in ZERO_CENTRED:
            return values - 1
        dim, after_keys = TILED[short]
        keys, values = values[: self.keys * after_keys], values[self.keys * after_keys :]
        values = torch.cat((keys, untile_value_heads(values, self.key_heads, self.value_heads, dim)))
        if short == "ssm_a":
            return torch.log(-values.double()).float()
        return values.unsqueeze(1) if short == "ssm_conv1d.weight" else values

    def reason_to_ignore(self, name: str) -> str | None:
        """Why the forward does not need a tensor, or None if it does."""
        block = BLOCK_NAME.fullmatch(name)
        return PREDICTION if block and int(block[1]) >= self.layers else None
