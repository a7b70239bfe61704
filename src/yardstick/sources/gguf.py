"""Source `gguf:`: llama.cpp's files, with the converter's changes undone.

The converter permutes the rows of q and k of llama models, so that rotary embedding can work on neighbouring pairs
(row 2i and 2i + 1 of a head) where Hugging Face rotates halves (row i and i + head_dim / 2). Reading undoes it, with
the number of query heads for q and of key heads for k. Qwen models are not permuted; Qwen3.5 has changes of its own
(`gguf_qwen35`).
GGUF lists dimensions fastest first; the bytes are the same row-major [out, in] as ours.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import libgguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig
from yardstick.sources.base import LazyRows, TensorInfo, TensorSource
from yardstick.sources.gguf_file import GgufFile, GgufTensor
from yardstick.sources.gguf_qwen35 import Qwen35Layout, Undo

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
QWEN35 = "qwen35"
# what llama.cpp calls our families
ARCHITECTURES = {family: family for family in ROTARY_PERMUTED} | {"qwen3_5_text": QWEN35}
IGNORED = {"rope_freqs.weight": "rotary frequencies, derived from the config"}
INPUT_SCALE = "scale of activations, of no use to weights"
# plain types: the numpy type that is stored, and the smallest float that holds each of its values
PLAIN = {
    Type.F32: (np.float32, np.float32),
    Type.F16: (np.float16, np.float32),
    Type.F64: (np.float64, np.float64),
    Type.I8: (np.int8, np.float32),
    Type.I16: (np.int16, np.float32),
    Type.I32: (np.int32, np.float64),
}


def hf_name(gguf_name: str) -> str | None:
    """Hugging Face name of a GGUF tensor of a plain transformer, or None where we know none."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{suffix}"
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
    """Values of a GGUF tensor [out, in], decoded by ggml's own row functions (libgguf).

    fp32, or fp64 for the two plain types that need it.

    Raises:
        YardstickError: the type has no decoder.
    """
    if tensor.kind in PLAIN:
        stored, exact = PLAIN[tensor.kind]
        return tensor.data.view(stored).astype(exact, copy=False).reshape(tensor.shape)
    if tensor.kind == Type.BF16:
        return (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    try:
        return libgguf.dequantize_rows(tensor.rows, int(tensor.kind), tensor.shape[-1]).reshape(tensor.shape)
    except ValueError as error:
        raise YardstickError(f"GGUF tensor {tensor.name}: no decoder for {tensor.kind.name} ({error})") from None


class RotaryLayout:
    """Names of a plain transformer's tensors, with q and k permuted where the architecture has it."""

    def __init__(self, file: GgufFile, prefix: str, architecture: str) -> None:
        self.path, self.prefix = file.path, prefix
        self._heads: dict[str, int] = {}
        if ROTARY_PERMUTED[architecture]:
            heads = file.number(f"{architecture}.attention.head_count")
            self._heads = {
                "q_proj": heads,
                "k_proj": file.number(f"{architecture}.attention.head_count_kv", heads),
            }

    def place(self, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], Undo | None] | None:
        """Hugging Face name and shape of a tensor, and what undoes its changes; None where we know no name.

        Raises:
            YardstickError: the shape does not fit the number of heads.
        """
        known = hf_name(name)
        if known is None:
            return None
        if known.startswith("model."):
            known = self.prefix + known.removeprefix("model.")
        heads = self._heads.get(known.split(".")[-2])
        if heads is None:
            return known, shape, None
        if heads < 1 or shape[0] % (2 * heads):
            raise YardstickError(f"{self.path}: tensor {name} has {shape[0]} rows, which do not fit {heads} heads")
        return known, shape, partial(unpermute_rotary, heads=heads)

    def reason_to_ignore(self, name: str) -> str | None:
        """Why the forward does not need a tensor, or None if it does."""
        return IGNORED.get(name)


@dataclass(frozen=True)
class Placed:
    """A tensor of the file in its place in the model."""

    tensor: GgufTensor
    undo: Undo | None
    scale: GgufTensor | None  # one factor for the whole tensor, which NVFP4 files store beside it


class GgufSource(TensorSource):
    """Every tensor of a GGUF file under its Hugging Face name, dequantized to fp32.

    `prefix` is the one of the model's own names, such as `model.language_model.` With `config`, the model's, a file
    that describes another model is refused.
    """

    def __init__(self, path: Path, prefix: str = "model.", config: ModelConfig | None = None) -> None:
        super().__init__(path)
        self._file = GgufFile(self.path)
        if config:
            require_model(self._file, config)
        layout = open_layout(self._file, prefix)
        self._placed: dict[str, Placed] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._ignored: dict[str, str] = {}
        tensors = self._file.tensors
        for kind in sorted({tensor.kind for tensor in tensors.values()}):
            require_decoder(kind, self.path)
        beside = {name: tensors.get(f"{name.removesuffix('.weight')}.scale") for name in tensors}
        scales = {name: scale for name, scale in beside.items() if scale and scale.shape == (1,)}
        read_with_weight = {scale.name for scale in scales.values()}
        for name in tensors:
            if name in read_with_weight:
                continue
            reason = INPUT_SCALE if name.endswith(".input_scale") else layout.reason_to_ignore(name)
            # what the forward does not need, and what we do not know, keeps its name; the audit sees the latter
            tensor, scale = tensors[name], scales.get(name)
            target, shape, undo = (None if reason else layout.place(name, tensor.shape)) or (name, tensor.shape, None)
            if reason:
                self._ignored[target] = reason
            if target in self._placed:
                raise YardstickError(f"{path}: tensor {name} is a second {target}")
            if target == name and name.startswith(("model.", "lm_head.")):
                raise YardstickError(f"{path}: tensor {name} has no GGUF name; its order of rows is not known")
            self._placed[target] = Placed(tensor, undo, scale)
            bits = 8 * (tensor.data.nbytes + (scale.data.nbytes if scale else 0))
            self._infos[target] = TensorInfo(shape, tensor.kind.name, bits)

    @classmethod
    def open(cls, path: Path, config: ModelConfig | None = None, base: TensorSource | None = None) -> "GgufSource":
        return cls(path, config.prefix, config) if config else cls(path)

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def ignored(self) -> dict[str, str]:
        return self._ignored

    def read(self, name: str) -> torch.Tensor:
        placed = self._placed[name]
        values = self._decode(placed, placed.tensor)
        return placed.undo(values) if placed.undo else values

    def rows(self, name: str) -> torch.Tensor | LazyRows:
        placed = self._placed.get(name)
        if placed is None or placed.undo or len(placed.tensor.shape) != 2:
            return self.get(name)
        return LazyRows(self, name, lambda start, stop: self._decode(placed, placed.tensor.part(start, stop)))

    def _decode(self, placed: Placed, tensor: GgufTensor) -> torch.Tensor:
        self._file.require_whole()
        values = torch.from_numpy(dequantize_gguf(tensor).copy())
        if placed.scale:
            values *= float(dequantize_gguf(placed.scale)[0])
        self._file.forget_pages()
        return values


def open_layout(file: GgufFile, prefix: str) -> RotaryLayout | Qwen35Layout:
    """Layout of a file's architecture.

    Raises:
        YardstickError: an architecture whose changes we do not know.
    """
    architecture = str(file.value("general.architecture"))
    if architecture == QWEN35:
        return Qwen35Layout(file, prefix)
    if architecture not in ROTARY_PERMUTED:
        known = ", ".join(sorted([*ROTARY_PERMUTED, QWEN35]))
        raise YardstickError(f"{file.path}: GGUF architecture {architecture} is not supported (supported: {known})")
    return RotaryLayout(file, prefix, architecture)


def require_model(file: GgufFile, config: ModelConfig) -> None:
    """Refuse a file whose metadata describe another model: the number of heads decides where rows lie, and what
    llama.cpp would run is not what is measured here.

    Raises:
        YardstickError: names the key and both values.
    """
    architecture = str(file.value("general.architecture"))
    if architecture != ARCHITECTURES.get(config.family):
        raise YardstickError(f"{file.path}: GGUF architecture is {architecture}, the model is a {config.family}")
    layers = file.number(f"{architecture}.nextn_predict_layers", 0) + config.num_layers
    expected = {
        "block_count": layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    for key, value in expected.items():
        name = f"{architecture}.{key}"
        found = file.value(name, value)  # a key that is left out says nothing
        # one for each layer, 0 where it has no attention
        numbers = [item for item in found if item != 0] if isinstance(found, list) else [found]
        plain = all(isinstance(item, int | float) and not isinstance(item, bool) for item in numbers)
        # floats are stored in 32 bits
        if not (plain and all(math.isclose(item, value, rel_tol=1e-6) for item in numbers)):
            raise YardstickError(f"{file.path}: GGUF metadata key {name} is {str(found)[:60]}, the model has {value}")


def require_decoder(kind: Type, path: Path) -> None:
    """Refuse a file with a type that cannot be decoded, before anything is measured.

    Raises:
        YardstickError: the type has no decoder.
    """
    block, size = GGML_QUANT_SIZES[kind]
    try:
        dequantize_gguf(GgufTensor("of one block", (1, block), kind, np.zeros(size, dtype=np.uint8)))
    except YardstickError as error:
        raise YardstickError(f"{path}: {error}") from None
