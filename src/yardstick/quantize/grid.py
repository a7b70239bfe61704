"""Choice of a group's scale and minimum, and of the codes for given ones.

Scale and minimum are rounded to bf16 before any code is chosen: the codes are the best ones for the values that the
dequantizer will use.
"""

from dataclasses import dataclass

import torch

from yardstick.quantize.pack import LEVELS, dequantize, group_count

SMALLEST_NORMAL = torch.finfo(torch.bfloat16).tiny
MSE_STEPS, MSE_SMALLEST, MSE_POWER = 33, 0.6, 2.4


@dataclass(frozen=True)
class Grid:
    """How groups are formed: columns per group, and whether the range is searched."""

    group_size: int
    mse: bool = False


def find_range(weights: torch.Tensor, mse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum for groups in the last dimension of fp32 `weights` [..., g].

    Without `mse` the range is [min, max] of the group. With it, 33 shrunken ranges f * [min, max], f from 1.0 to
    0.6, are tried and the one with the least sum of |w - ŵ|^2.4 is kept (the search of GPTQ's reference code,
    Frantar et al. 2022).

    Returns:
        scale and minimum, fp32 values that are exact in bf16, shape [...]. A constant group has scale 0: its codes
        are 0 and its value is the minimum.
    """
    low, high = weights.amin(-1), weights.amax(-1)
    scale, minimum = _round_range(low, high)
    if not mse:
        return scale, minimum
    best = _range_error(weights, scale, minimum)
    for step in range(1, MSE_STEPS):
        factor = 1.0 - (1.0 - MSE_SMALLEST) * step / (MSE_STEPS - 1)
        trial_scale, trial_minimum = _round_range(low * factor, high * factor)
        error = _range_error(weights, trial_scale, trial_minimum)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, trial_scale, scale)
        minimum = torch.where(better, trial_minimum, minimum)
    return scale, minimum


def _round_range(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = ((high - low) / LEVELS).bfloat16().float()
    # a range this small has no fifteen steps in bf16: store the group as one value
    scale = torch.where(scale < SMALLEST_NORMAL, torch.zeros_like(scale), scale)
    minimum = torch.where(scale == 0, (low + high) / 2, low).bfloat16().float()
    return scale, minimum


def _range_error(weights: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Sum over the group of |w - ŵ|^2.4."""
    scale, minimum = scale.unsqueeze(-1), minimum.unsqueeze(-1)
    restored = (weights - minimum).div_(safe_divisor(scale)).round_().clamp_(0, LEVELS).mul_(scale).add_(minimum)
    # |x|^p as exp(p log |x|): torch's own power takes four times as long
    return restored.sub_(weights).abs_().log_().mul_(MSE_POWER).exp_().sum(-1)


def safe_divisor(scale: torch.Tensor) -> torch.Tensor:
    """The scale, with infinity for 0, so that the code of a constant group is 0."""
    return torch.where(scale == 0, torch.full_like(scale, torch.inf), scale)


def nearest_codes(weights: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Codes clamp(round((w - min) / scale), 0, 15) as fp32; `scale` and `minimum` broadcast against `weights`."""
    return (weights - minimum).div_(safe_divisor(scale)).round_().clamp_(0, LEVELS)


def round_to_nearest(weights: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RTN: codes uint8 [out, in], scales and minima bf16 [out, groups] for fp32 weights [out, in]."""
    scales, minima = static_ranges(weights, grid)
    codes = torch.empty(weights.shape, dtype=torch.uint8, device=weights.device)
    for group in range(scales.shape[1]):
        columns = slice(group * grid.group_size, (group + 1) * grid.group_size)
        codes[:, columns] = nearest_codes(weights[:, columns], scales[:, group, None], minima[:, group, None])
    return codes, scales.bfloat16(), minima.bfloat16()


def round_in_terms(weights: torch.Tensor, grid: Grid, terms: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `round_to_nearest`, in a sum of terms: each rounds what those before it leave. Rows of all terms behind each
    other, [terms * out, ...]."""
    found, left = [], weights
    for term in range(terms):
        found.append(round_to_nearest(left, grid))
        if term + 1 < terms:
            left = left - dequantize(*found[-1], grid.group_size)
    codes, scales, minima = (torch.cat(parts) for parts in zip(*found, strict=True))
    return codes, scales, minima


def static_ranges(weights: torch.Tensor, grid: Grid, rows_at_once: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges of all groups of fp32 weights [out, in]: scales and minima, fp32 [out, groups]."""
    out_features, in_features = weights.shape
    groups = group_count(in_features, grid.group_size)
    whole = in_features // grid.group_size
    scales = torch.empty(out_features, groups, device=weights.device)
    minima = torch.empty_like(scales)
    for start in range(0, out_features, rows_at_once):  # blocks that stay in cache during the search
        rows = slice(start, start + rows_at_once)
        if whole:
            grouped = weights[rows, : whole * grid.group_size].unflatten(1, (whole, grid.group_size))
            scales[rows, :whole], minima[rows, :whole] = find_range(grouped, grid.mse)
        if whole < groups:
            scales[rows, whole], minima[rows, whole] = find_range(weights[rows, whole * grid.group_size :], grid.mse)
    return scales, minima
