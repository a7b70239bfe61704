"""Source `gguf:`: llama.cpp's files, with the converter's changes undone.

The converter permutes the rows of q and k of llama models, so that rotary embedding can work on neighbouring pairs
(row 2i and 2i + 1 of a head) where Hugging Face rotates halves (row i and i + head_dim / 2). Reading undoes it, with
the number of query heads for q and of key heads for k. Qwen models are not permuted.
GGUF lists dimensions fastest first; the bytes are the same row-major [out, in] as ours.
"""

from pathlib import Path

import libgguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from yardstick.errors import YardstickError
from yardstick.sources.base import LazyRows, TensorInfo, TensorSource
from yardstick.sources.gguf_file import GgufFile, GgufTensor

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROTARY_PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}
IGNORED = {"rope_freqs.weight": "rotary frequencies, derived from the config"}


def hf_name(gguf_name: str) -> str | None:
    """Hugging Face name of a GGUF tensor, or None where we know none."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in LAYER_NAMES:
        return f"model.layers.{int(parts[1])}.{LAYER_NAMES[parts[2]]}.{suffix}"
    return None


def gguf_name(name: str) -> str:
    """GGUF name of a Hugging Face tensor.

    Raises:
        YardstickError: the tensor has no name in a GGUF file.
    """
    stem, _, suffix = name.rpartition(".")
    for short, long in TOP_NAMES.items():
        if stem == long:
            return f"{short}.{suffix}"
    parts = stem.split(".", 3)
    if len(parts) == 4 and parts[:2] == ["model", "layers"]:
        for short, long in LAYER_NAMES.items():
            if parts[3] == long:
                return f"blk.{parts[2]}.{short}.{suffix}"
    raise YardstickError(f"tensor {name} has no known GGUF name")


def permute_rotary(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Hugging Face row order to GGUF's: head rows [0, 1, ..., d-1] become [0, d/2, 1, d/2 + 1, ...].

    Works on [rows, ...]: weights, biases, packed rows and per-row scales alike.
    """
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


def unpermute_rotary(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF row order to Hugging Face's; the inverse of `permute_rotary`."""
    rows = tensor.shape[0]
    return tensor.reshape(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def dequantize_gguf(tensor: GgufTensor) -> np.ndarray:
    """Values of a GGUF tensor as fp32 [out, in], decoded by ggml's own row functions (libgguf).

    Raises:
        YardstickError: the type has no decoder.
    """
    if tensor.kind == GGMLQuantizationType.F32:
        return tensor.data.view(np.float32).reshape(tensor.shape)
    if tensor.kind == GGMLQuantizationType.F16:
        return tensor.data.view(np.float16).astype(np.float32).reshape(tensor.shape)
    if tensor.kind == GGMLQuantizationType.BF16:
        return (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    try:
        return libgguf.dequantize_rows(tensor.rows, int(tensor.kind), tensor.shape[-1]).reshape(tensor.shape)
    except ValueError as error:
        raise YardstickError(f"GGUF tensor {tensor.name}: no decoder for {tensor.kind.name} ({error})") from None


class GgufSource(TensorSource):
    """Every tensor of a GGUF file under its Hugging Face name, dequantized to fp32."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = file = GgufFile(self.path)
        architecture = file.value("general.architecture")
        if architecture not in ROTARY_PERMUTED:
            known = ", ".join(sorted(ROTARY_PERMUTED))
            raise YardstickError(f"{path}: GGUF architecture {architecture} is not supported (supported: {known})")
        heads = int(file.value(f"{architecture}.attention.head_count"))
        kv_heads = int(file.value(f"{architecture}.attention.head_count_kv", heads))
        self._heads = {"q_proj": heads, "k_proj": kv_heads} if ROTARY_PERMUTED[architecture] else {}
        # a tensor whose name we do not know keeps it, and the audit will call it left over
        self._tensors = {hf_name(name) or name: tensor for name, tensor in file.tensors.items()}
        self._infos = {
            name: TensorInfo(tensor.shape, tensor.kind.name, 8 * tensor.data.nbytes)
            for name, tensor in self._tensors.items()
        }

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def ignored(self) -> dict[str, str]:
        return {name: reason for name, reason in IGNORED.items() if name in self._tensors}

    def read(self, name: str) -> torch.Tensor:
        values = self._decode(self._tensors[name])
        module = name.split(".")[-2]
        return unpermute_rotary(values, self._heads[module]) if module in self._heads else values

    def rows(self, name: str) -> torch.Tensor | LazyRows:
        if name not in self._tensors or name.split(".")[-2] in self._heads:
            return self.get(name)
        tensor = self._tensors[name]
        return LazyRows(self, name, lambda start, stop: self._decode(tensor.part(start, stop)))

    def _decode(self, tensor: GgufTensor) -> torch.Tensor:
        values = torch.from_numpy(dequantize_gguf(tensor).copy())
        self._file.forget_pages()
        return values
