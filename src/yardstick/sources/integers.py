"""The stored 4-bit integers of a matrix, for those who take them over as they are instead of decoding them.

    w[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g],  g = i // group_size

Whatever a format does to them (offsets, order in a word, transposition) is undone in its source.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from yardstick.errors import YardstickError
from yardstick.quantize.pack import LEVELS
from yardstick.sources.base import require_finite

TILE = 1 << 22  # codes unpacked at a time: unpacking takes many times the memory of its result


@dataclass(frozen=True)
class Integers:
    """codes uint8 [out, in] and zeros uint8 [out, groups] in 0..15, scales fp32 [out, groups]; the last group of a row
    may be short."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int


def checked_integers(
    what: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> Integers:
    """Integers of a tensor that `what` names.

    Raises:
        YardstickError: a code or zero point is not in 0..15, or a scale is not finite.
    """
    for kind, values in (("code", codes), ("zero point", zeros)):
        low, high = (int(value) for value in torch.aminmax(values))
        if low < 0 or high > LEVELS:
            raise YardstickError(f"{what} has a {kind} of {high if high > LEVELS else low}, outside of 0..{LEVELS}")
    scales = scales.to(torch.float32).contiguous()
    require_finite(scales, f"{what}: its scale")
    return Integers(codes.to(torch.uint8).contiguous(), scales, zeros.to(torch.uint8).contiguous(), group_size)


def require_contiguous(what: str, groups: torch.Tensor, group_size: int) -> None:
    """Refuse a matrix whose groups [in] are not consecutive columns.

    Raises:
        YardstickError: they are not.
    """
    if not torch.equal(groups.to(torch.int64), torch.arange(len(groups)) // group_size):
        raise YardstickError(f"{what}: its groups are not {group_size} consecutive columns each (g_idx)")


def unpack_rows(words: torch.Tensor, count: int, unpack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """uint8 codes [rows, count] of words [rows, ...], some rows at a time."""
    codes = torch.empty(len(words), count, dtype=torch.uint8)
    step = max(TILE // count, 1)
    for start in range(0, len(words), step):
        codes[start : start + step] = unpack(words[start : start + step])[:, :count]
    return codes
