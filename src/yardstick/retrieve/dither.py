"""Draw a stand-in bf16 original from a quantized release.

A release on a 16-level grid is reproduced almost exactly by any format with the same blocks, which says nothing
about formats. The reference is therefore drawn from it: each weight uniformly from the rounding cell that its code
stands for, w = value + d * u with u in [-1/2, 1/2), where d is the step of its block or sub-block, then rounded to
bf16.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import Q4_K

from yardstick.errors import YardstickError
from yardstick.sources.gguf import dequantize_gguf
from yardstick.sources.gguf_file import GgufTensor

ROWS_AT_ONCE = 4096


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fp16 number at byte `at` of every block, as fp32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


# Type -> steps of blocks of bytes, [blocks, sub-blocks]. K types scale the block's d by a small whole number for each
# sub-block: 6 bits for 32 weights of Q4_K, an int8 for 16 weights of Q6_K.
STEPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_1": lambda blocks: half(blocks, 0),
    "Q5_0": lambda blocks: half(blocks, 0),
    "Q8_0": lambda blocks: half(blocks, 0),
    "Q4_K": lambda blocks: half(blocks, 0) * Q4_K.get_scale_min(blocks[:, 4:16])[0],
    "Q6_K": lambda blocks: half(blocks, 208) * blocks[:, 192:208].view(np.int8),
}


def uniform_cell_offsets(count: int, seed: int, name: str, start: int = 0) -> np.ndarray:
    """`count` fp32 numbers in [-1/2, 1/2) from the one at `start` on, a fixed function of seed and tensor name.

    The raw stream of PCG64 is guaranteed not to change between numpy versions; the upper 24 bits of each word are
    used, so every number is exact in fp32.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(digest[:16], "little")).advance(start).random_raw(count)
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)


def block_steps(tensor: GgufTensor) -> np.ndarray:
    """The step of every weight of a GGUF tensor, by which its value moves when its code moves by one: fp32 [out, in].

    Raises:
        YardstickError: the type has no even steps, or none that are known here.
    """
    kind = tensor.kind.name
    if kind not in STEPS:
        raise YardstickError(f"dither: GGUF tensor {tensor.name} has type {kind}, only {', '.join(STEPS)} can")
    block, size = GGML_QUANT_SIZES[tensor.kind]
    steps = STEPS[kind](tensor.data.reshape(-1, size))
    return np.repeat(steps, block // steps.shape[1], axis=1).reshape(tensor.shape)


def dither_tensor(tensor: GgufTensor, seed: int | None) -> torch.Tensor:
    """bf16 values of a GGUF tensor in its own row order, dithered where it is quantized and `seed` is not None."""
    if len(tensor.shape) == 1:
        return torch.from_numpy(dithered(tensor, seed, 0)).bfloat16()
    result = torch.empty(tensor.shape, dtype=torch.bfloat16)
    for start in range(0, len(result), ROWS_AT_ONCE):  # an embedding in fp32, and its offsets, take gigabytes
        stop = min(start + ROWS_AT_ONCE, len(result))
        rows = dithered(tensor.part(start, stop), seed, start * tensor.shape[-1])
        result[start:stop] = torch.from_numpy(rows)
    return result


def dithered(tensor: GgufTensor, seed: int | None, start: int) -> np.ndarray:
    """fp32 values of a tensor, or of rows of one before which `start` weights lie."""
    values = dequantize_gguf(tensor).astype(np.float32)
    if seed is None or tensor.kind.name == "F32":
        return values
    offsets = uniform_cell_offsets(values.size, seed, tensor.name, start).reshape(values.shape)
    return values + block_steps(tensor) * offsets
