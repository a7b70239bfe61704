"""A few rows times a packed matrix, on tensor cores: Y = X W^T for 2 to 64 rows.

As in `gemv` the codes are multiplied and the sums of each group scaled: codes 0..15 are exact in bf16 and fp16, so the
products are those of the stored weights, added in fp32. A group is one step of the loop.
"""

import torch
import triton
import triton.language as tl

from yardstick.engine.kernels.pieces import code_product, sum_of_splits
from yardstick.engine.weight import PackedWeight


@triton.jit
def gemm_kernel(
    x_pointer,
    codes_pointer,
    scales_pointer,
    minima_pointer,
    out_pointer,
    batch,
    out_features,
    in_features,
    row_bytes,
    groups,
    groups_per_split,
    GROUP: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A program is BATCH rows of X, ROWS rows of W and one split of the columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    texts = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    split = tl.program_id(2)
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, groups)
    byte = tl.arange(0, GROUP // 2)
    row_there, text_there = rows < out_features, texts < batch
    x_start = x_pointer + texts.to(tl.int64)[:, None] * in_features
    code_start = codes_pointer + rows.to(tl.int64)[:, None] * row_bytes
    sums = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    for group in range(first, last):
        column = group * GROUP + 2 * byte
        even = tl.load(x_start + column[None, :], mask=text_there[:, None] & (column < in_features)[None, :], other=0.0)
        odd = tl.load(
            x_start + column[None, :] + 1, mask=text_there[:, None] & (column + 1 < in_features)[None, :], other=0.0
        )
        place = group * (GROUP // 2) + byte
        pairs = tl.load(
            code_start + place[None, :], mask=row_there[:, None] & (place < row_bytes)[None, :], other=0
        ).to(tl.int32)
        product, total = code_product(even, odd, pairs, WIDEN, SYMMETRIC)
        where = rows.to(tl.int64) * groups + group
        scale = tl.load(scales_pointer + where, mask=row_there, other=0.0).to(tl.float32)
        sums += product * scale[None, :]
        if not SYMMETRIC:
            minimum = tl.load(minima_pointer + where, mask=row_there, other=0.0).to(tl.float32)
            sums += total[:, None] * minimum[None, :]
    place = (split * batch + texts).to(tl.int64)[:, None] * out_features + rows[None, :]
    tl.store(out_pointer + place, sums, mask=text_there[:, None] & row_there[None, :])


def gemm(
    x: torch.Tensor, weight: PackedWeight, batch: int, rows: int, splits: int = 1, warps: int = 4, stages: int = 3
) -> torch.Tensor:
    """X W^T.

    Args:
        x: [texts, in], contiguous, of a floating type.
        weight: group size a power of two, at least 32.
        batch, rows: tile of a program, powers of two, at least 16.
        splits: parts that the columns are cut into.
        warps, stages: of a program.

    Returns:
        fp32 [texts, out].
    """
    count = weight.scales.shape[1]
    parts = x.new_empty((splits, len(x), weight.out_features), dtype=torch.float32)
    gemm_kernel[(triton.cdiv(weight.out_features, rows), triton.cdiv(len(x), batch), splits)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        parts,
        len(x),
        weight.out_features,
        weight.in_features,
        weight.codes.shape[1],
        count,
        -(-count // splits),
        GROUP=weight.group_size,
        BATCH=batch,
        ROWS=rows,
        SYMMETRIC=weight.minima is None,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=warps,
        num_stages=stages,
    )
    return sum_of_splits(parts)
