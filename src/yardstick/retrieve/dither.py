"""Draw a stand-in bf16 original from a quantized release.

A release on a 16-level grid is reproduced almost exactly by any format with the same blocks, which says nothing
about formats. The reference is therefore drawn from it: each weight uniformly from the rounding cell that its code
stands for, w = value + d * u with u in [-1/2, 1/2), where d is the step of its block, then rounded to bf16.
"""

import hashlib

import numpy as np
import torch

from yardstick.errors import YardstickError
from yardstick.sources.gguf import dequantize_gguf
from yardstick.sources.gguf_file import GgufTensor

# type -> bytes of a 32-weight block; both begin with the fp16 step d
STEP_FIRST_BLOCKS = {"Q4_1": 20, "Q8_0": 34}


def uniform_cell_offsets(count: int, seed: int, name: str) -> np.ndarray:
    """fp32 numbers in [-1/2, 1/2), a fixed function of seed and tensor name.

    The raw stream of PCG64 is guaranteed not to change between numpy versions; the upper 24 bits of each word are
    used, so every number is exact in fp32.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(count)
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)


def block_steps(tensor: GgufTensor) -> np.ndarray:
    """The step d of every weight of a GGUF tensor, fp32 [out, in].

    Raises:
        YardstickError: the type does not begin its blocks with a step.
    """
    kind = tensor.kind.name
    if kind not in STEP_FIRST_BLOCKS:
        raise YardstickError(
            f"dither: GGUF tensor {tensor.name} has type {kind}, only {', '.join(STEP_FIRST_BLOCKS)} can"
        )
    blocks = tensor.data.reshape(-1, STEP_FIRST_BLOCKS[kind])
    steps = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.repeat(steps, 32, axis=1).reshape(tensor.shape)


def dither_tensor(tensor: GgufTensor, seed: int | None) -> torch.Tensor:
    """bf16 values of a GGUF tensor in its own row order, dithered where it is quantized and `seed` is not None."""
    values = dequantize_gguf(tensor)
    if seed is not None and tensor.kind.name != "F32":
        values = values + block_steps(tensor) * uniform_cell_offsets(values.size, seed, tensor.name).reshape(
            values.shape
        )
    return torch.from_numpy(values.astype(np.float32)).bfloat16()
