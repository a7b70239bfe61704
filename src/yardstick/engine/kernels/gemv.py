"""One row times a packed matrix: y = W x, each weight read once, four and a quarter bits of it.

Codes are multiplied as integers group by group, and the group's scale and minimum applied to the sums:

    y[r] = sum over groups g of  scale[r, g] * (sum over c in g of code[r, c] * x[c]) + minimum[r, g] * (sum of x[c])

so no weight is ever rounded to bf16. Long rows of few outputs are split along the columns (`splits`): each part writes
its own sum and they are added in order, so that the result does not depend on which part is done first.
"""

import torch
import triton
import triton.language as tl

from yardstick.engine.kernels.pieces import nibbles, sum_of_splits
from yardstick.engine.weight import PackedWeight


@triton.jit
def gemv_kernel(
    x_pointer,
    codes_pointer,
    scales_pointer,
    minima_pointer,
    out_pointer,
    out_features,
    in_features,
    row_bytes,
    groups,
    groups_per_split,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """A program is ROWS rows of one split; it reads GROUPS groups of columns at a time."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, groups)
    byte = tl.arange(0, GROUP // 2)
    row_there = rows < out_features
    row_start = rows.to(tl.int64) * row_bytes
    sums = tl.zeros((ROWS, GROUPS), dtype=tl.float32)
    for start in range(first, last, GROUPS):
        group = start + tl.arange(0, GROUPS)
        group_there = group < last
        column = group[:, None] * GROUP + 2 * byte[None, :]
        even = tl.load(x_pointer + column, mask=group_there[:, None] & (column < in_features), other=0.0)
        odd = tl.load(x_pointer + column + 1, mask=group_there[:, None] & (column + 1 < in_features), other=0.0)
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        place = group[:, None] * (GROUP // 2) + byte[None, :]
        there = group_there[:, None] & (place < row_bytes)
        pairs = tl.load(
            codes_pointer + row_start[:, None, None] + place[None, :, :],
            mask=row_there[:, None, None] & there[None, :, :],
            other=0,
        ).to(tl.int32)
        low, high = nibbles(pairs, SYMMETRIC)
        product = low.to(tl.float32) * even[None, :, :] + high.to(tl.float32) * odd[None, :, :]
        both = row_there[:, None] & group_there[None, :]
        where = rows.to(tl.int64)[:, None] * groups + group[None, :]
        scale = tl.load(scales_pointer + where, mask=both, other=0.0).to(tl.float32)
        sums += tl.sum(product, axis=2) * scale
        if not SYMMETRIC:
            minimum = tl.load(minima_pointer + where, mask=both, other=0.0).to(tl.float32)
            sums += tl.sum(even + odd, axis=1)[None, :] * minimum
    tl.store(out_pointer + split.to(tl.int64) * out_features + rows, tl.sum(sums, axis=1), mask=row_there)


def gemv(
    x: torch.Tensor, weight: PackedWeight, rows: int, groups: int, splits: int = 1, warps: int = 4
) -> torch.Tensor:
    """W x for one row.

    Args:
        x: [1, in] of a floating type.
        weight: group size a power of two, at least 2.
        rows, groups: tile of a program, powers of two.
        splits: parts that the columns are cut into.
        warps: of a program.

    Returns:
        fp32 [1, out].
    """
    count = weight.scales.shape[1]
    per_split = -(-count // splits)
    parts = x.new_empty((splits, weight.out_features), dtype=torch.float32)
    gemv_kernel[(triton.cdiv(weight.out_features, rows), splits)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        parts,
        weight.out_features,
        weight.in_features,
        weight.codes.shape[1],
        count,
        per_split,
        GROUP=weight.group_size,
        ROWS=rows,
        GROUPS=groups,
        SYMMETRIC=weight.minima is None,
        num_warps=warps,
    )
    return sum_of_splits(parts)[None]
