"""What the kernels share."""

import torch
import triton
import triton.language as tl


@triton.jit
def nibbles(pairs, SYMMETRIC: tl.constexpr):
    """The low and the high code of each byte, 0..15, or -8..7 in two's complement."""
    low, high = pairs & 15, pairs >> 4
    if SYMMETRIC:
        low, high = (low ^ 8) - 8, (high ^ 8) - 8
    return low, high


@triton.jit
def code_product(first, second, pairs, WIDEN: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Inputs [batch, half] of the low and of the high codes, times the codes of bytes [rows, half]: fp32 [batch, rows],
    and the sum of all inputs [batch]."""
    low, high = nibbles(pairs, SYMMETRIC)
    if WIDEN:  # the interpreter multiplies bf16 as if they were integers
        first, second = first.to(tl.float32), second.to(tl.float32)
    product = tl.dot(first, tl.trans(low.to(first.dtype)), input_precision="ieee")
    product = tl.dot(second, tl.trans(high.to(second.dtype)), acc=product, input_precision="ieee")
    return product, tl.sum(first.to(tl.float32) + second.to(tl.float32), axis=1)


def sum_of_splits(parts: torch.Tensor) -> torch.Tensor:
    """Sums [splits, ...] of parts of the columns, added in order."""
    return parts[0] if len(parts) == 1 else parts.sum(dim=0)
