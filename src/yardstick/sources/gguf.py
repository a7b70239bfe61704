"""Source `gguf:`: llama.cpp's files, with the converter's changes undone.

The converter permutes the rows of q and k of llama models, so that rotary embedding can work on neighbouring pairs
(row 2i and 2i + 1 of a head) where Hugging Face rotates halves (row i and i + head_dim / 2). Reading undoes it, with
the number of query heads for q and of key heads for k. Qwen models are not permuted.
GGUF lists dimensions fastest first; the bytes are the same row-major [out, in] as ours.
"""

import os
from pathlib import Path

import numpy as np
import torch

from yardstick.errors import YardstickError
from yardstick.sources.base import TensorInfo, TensorSource

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


def open_gguf(path: Path):
    """Open a GGUF file with the `gguf` package, after checking that its data is all there.

    Raises:
        YardstickError: not a GGUF file, truncated, or one shard of a split file.
    """
    import gguf

    if not path.is_file():
        raise YardstickError(f"{path}: no such file")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the package raises ValueError, IndexError or numpy errors on damaged headers
        raise YardstickError(f"{path}: truncated or not a GGUF file ({type(error).__name__}: {error})") from None
    size = os.path.getsize(path)
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise YardstickError(
                f"{path}: truncated: tensor {tensor.name} needs bytes up to {tensor.data_offset + tensor.n_bytes}, "
                f"the file has {size}"
            )
    if "split.count" in reader.fields and int(reader.fields["split.count"].contents()) > 1:
        raise YardstickError(f"{path}: is one part of a split file; join the parts with llama-gguf-split --merge first")
    return reader


def gguf_value(reader, key: str, default=None):
    """Metadata value of an open GGUF file.

    Raises:
        YardstickError: the key is missing and no default is given.
    """
    if key in reader.fields:
        return reader.fields[key].contents()
    if default is None:
        raise YardstickError(f"GGUF metadata key {key} is missing")
    return default


def dequantize_gguf(tensor) -> np.ndarray:
    """Values of a GGUF tensor as fp32 [out, in], decoded by ggml's own row functions (libgguf).

    Raises:
        YardstickError: the type has no decoder.
    """
    import gguf
    import libgguf

    shape = tuple(int(size) for size in reversed(tensor.shape))
    if tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return np.asarray(tensor.data).reshape(shape).astype(np.float32)
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return (np.asarray(tensor.data).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    rows = np.ascontiguousarray(tensor.data).reshape(-1, tensor.data.shape[-1])
    try:
        return libgguf.dequantize_rows(rows, int(tensor.tensor_type), shape[-1]).reshape(shape)
    except ValueError as error:
        raise YardstickError(f"GGUF tensor {tensor.name}: no decoder for {tensor.tensor_type.name} ({error})") from None


class GgufSource(TensorSource):
    """Every tensor of a GGUF file under its Hugging Face name, dequantized to fp32."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        reader = open_gguf(self.path)
        architecture = gguf_value(reader, "general.architecture")
        if architecture not in ROTARY_PERMUTED:
            known = ", ".join(sorted(ROTARY_PERMUTED))
            raise YardstickError(f"{path}: GGUF architecture {architecture} is not supported (supported: {known})")
        heads = int(gguf_value(reader, f"{architecture}.attention.head_count"))
        kv_heads = int(gguf_value(reader, f"{architecture}.attention.head_count_kv", heads))
        self._heads = {"q_proj": heads, "k_proj": kv_heads} if ROTARY_PERMUTED[architecture] else {}
        self._tensors = {}
        self._infos = {}
        self._ignored = {}
        for tensor in reader.tensors:
            name = hf_name(tensor.name) or tensor.name
            if tensor.name in IGNORED:
                self._ignored[name] = IGNORED[tensor.name]
            if name in self._tensors:
                raise YardstickError(f"{path}: tensor {tensor.name} is there twice")
            self._tensors[name] = tensor
            shape = tuple(int(size) for size in reversed(tensor.shape))
            self._infos[name] = TensorInfo(shape, tensor.tensor_type.name, 8 * int(tensor.n_bytes))

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def ignored(self) -> dict[str, str]:
        return self._ignored

    def read(self, name: str) -> torch.Tensor:
        values = torch.from_numpy(np.ascontiguousarray(dequantize_gguf(self._tensors[name])))
        module = name.split(".")[-2]
        return unpermute_rotary(values, self._heads[module]) if module in self._heads else values
