"""The packed matrix in the order in which a kernel reads it, as Marlin does (Frantar et al. 2024, arXiv 2408.11743).

Offline, the codes of ROWS rows and one group become one contiguous tile, and inside a group the first half of the
columns goes to the low nibbles and the second half to the high ones. So a thread's 128-bit load holds 16 neighbouring
columns of a half, which one shift and one mask turn into operands for a tensor core, and x is read in order. Scales and
minima lie in the same tiles. The bits are the same as before: the layout is undone by `unshuffle`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from yardstick.engine.kernels.pieces import code_product, sum_of_splits
from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError
from yardstick.quantize.pack import group_count, pack_nibbles, unpack_nibbles


@dataclass(frozen=True)
class ShuffledWeight:
    """A packed matrix by tiles.

    Attributes:
        codes: uint8 [row tiles, groups, rows, group_size / 2]: byte j holds column j of its group in the low nibble and
            column j + group_size / 2 in the high one.
        scales: bf16 [row tiles, groups, rows]; rows that fill the last tile have a scale and a minimum of 0.
        minima: as `scales`, or None.
        out_features, in_features: of the matrix.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    out_features: int
    in_features: int

    @property
    def group_size(self) -> int:
        return 2 * self.codes.shape[3]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.minima) if tensor is not None)


def shuffle(weight: PackedWeight, rows: int) -> ShuffledWeight:
    """Packed codes, scales and minima in tiles of `rows` rows; a short last group is filled with codes of 0.

    Raises:
        YardstickError: the group size is odd.
    """
    size, count = weight.group_size, weight.scales.shape[1]
    if size % 2:
        raise YardstickError(f"groups of {size} columns have no halves")
    tiles = -(-weight.out_features // rows)
    codes = unpack_nibbles(weight.codes, weight.in_features)
    fill = (0, count * size - weight.in_features, 0, tiles * rows - weight.out_features)
    codes = torch.nn.functional.pad(codes, fill).view(tiles, rows, count, 2, size // 2)
    joined = codes[:, :, :, 0] | (codes[:, :, :, 1] << 4)

    def tiled(values: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(values, (0, 0, 0, tiles * rows - weight.out_features))
        return padded.view(tiles, rows, count).transpose(1, 2).contiguous()

    minima = None if weight.minima is None else tiled(weight.minima)
    joined = joined.transpose(1, 2).contiguous()
    return ShuffledWeight(joined, tiled(weight.scales), minima, weight.out_features, weight.in_features)


def unshuffle(weight: ShuffledWeight) -> PackedWeight:
    """The inverse of `shuffle`."""
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=3)  # [tiles, groups, rows, half, columns]
    codes = codes.transpose(1, 2).flatten(0, 1).flatten(1)[: weight.out_features, : weight.in_features]

    def rows(values: torch.Tensor) -> torch.Tensor:
        return values.transpose(1, 2).flatten(0, 1)[: weight.out_features].contiguous()

    minima = None if weight.minima is None else rows(weight.minima)
    packed = pack_nibbles(codes).contiguous()
    return PackedWeight(packed, rows(weight.scales), minima, weight.in_features, weight.group_size)


@triton.jit
def shuffled_kernel(
    x_pointer,
    codes_pointer,
    scales_pointer,
    minima_pointer,
    out_pointer,
    batch,
    out_features,
    in_features,
    groups,
    groups_per_split,
    GROUP: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A program is BATCH rows of X, one tile of rows of W and one split of the columns."""
    tile = tl.program_id(0)
    texts = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    split = tl.program_id(2)
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, groups)
    row, byte = tl.arange(0, ROWS), tl.arange(0, GROUP // 2)
    text_there = texts < batch
    x_start = x_pointer + texts.to(tl.int64)[:, None] * in_features
    inside = row[:, None] * (GROUP // 2) + byte[None, :]
    sums = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    for group in range(first, last):
        block = tile.to(tl.int64) * groups + group
        pairs = tl.load(codes_pointer + block * (ROWS * (GROUP // 2)) + inside).to(tl.int32)
        near = group * GROUP + byte
        far = near + GROUP // 2
        x_near = tl.load(x_start + near[None, :], mask=text_there[:, None] & (near < in_features)[None, :], other=0.0)
        x_far = tl.load(x_start + far[None, :], mask=text_there[:, None] & (far < in_features)[None, :], other=0.0)
        product, total = code_product(x_near, x_far, pairs, WIDEN, SYMMETRIC)
        scale = tl.load(scales_pointer + block * ROWS + row).to(tl.float32)
        sums += product * scale[None, :]
        if not SYMMETRIC:
            minimum = tl.load(minima_pointer + block * ROWS + row).to(tl.float32)
            sums += total[:, None] * minimum[None, :]
    rows = tile * ROWS + row
    place = (split * batch + texts).to(tl.int64)[:, None] * out_features + rows[None, :]
    tl.store(out_pointer + place, sums, mask=text_there[:, None] & (rows < out_features)[None, :])


def shuffled_gemm(
    x: torch.Tensor, weight: ShuffledWeight, batch: int, splits: int = 1, warps: int = 4, stages: int = 3
) -> torch.Tensor:
    """X W^T for x [texts, in], contiguous, of a floating type; see `gemm.gemm`.

    Returns:
        fp32 [texts, out].
    """
    count = group_count(weight.in_features, weight.group_size)
    tiles, _, rows, _ = weight.codes.shape
    parts = x.new_empty((splits, len(x), weight.out_features), dtype=torch.float32)
    shuffled_kernel[(tiles, triton.cdiv(len(x), batch), splits)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        parts,
        len(x),
        weight.out_features,
        weight.in_features,
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
