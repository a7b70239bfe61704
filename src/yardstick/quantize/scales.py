"""AWQ's searches (Lin et al. 2023, arXiv 2306.00978): factors of a matrix's input channels, and clipped ranges.

Multiplying the columns of W by s and dividing its inputs by s changes nothing but what rounding costs. For inputs with
second moments H = E[x x^T] the output error of the rounded W' = Q(W diag(s)) diag(1 / s) is tr((W' - W) H (W' - W)^T),
so no input has to be kept.
"""

from collections.abc import Sequence

import torch

from yardstick.quantize.grid import Grid, find_range, nearest_codes, static_ranges
from yardstick.quantize.hessian import inverse_factor
from yardstick.quantize.pack import dequantize, group_count

MOST_ROWS = 1024  # of all matrices together, at equal distances: enough to tell factors apart
SMALLEST = 1e-4  # of a channel's statistic over the mean, so that a channel that is never excited has a factor
CLIP_STEPS, CLIP_SMALLEST = 20, 0.5
DESCENT_STEPS, DESCENT_RATE = 60, 0.03


def find_scales(
    matrices: Sequence[torch.Tensor],
    hessian: torch.Tensor,
    magnitude: torch.Tensor,
    channel_of: torch.Tensor,
    grid: Grid,
    steps: int,
    feedback: float | None,
    what: str,
) -> torch.Tensor:
    """Factors s of the channels that matrices [out, in] share as their input, the best of a search.

    Tried are s = m^a / w^(1 - a) and s = m^a for a = 0, 1 / steps, ..., 1, with m the mean of |x| and w the mean of
    |W| over its group's greatest, as in the authors' code; s = 1 is one of them. For a quantizer with feedback the best
    one is where `descend` starts. Each matrix counts by its output error over its output.

    Args:
        magnitude: mean of |x| for each column.
        channel_of: int64 [in], the channel of each column; columns of one channel (query heads that read one value
            head) share a factor.
        feedback: damping of a quantizer that spreads each rounding error over the columns to come (GPTQ). What is
            left of an error is then its variance given those columns, 1 / U_ii^2 of GPTQ's factor. None: rounding
            to nearest, which leaves all of it.

    Returns:
        fp32 [channels], with a geometric mean of 1.
    """
    stacked, weights = _sample([matrix.float() for matrix in matrices], hessian)
    left = None if feedback is None else remaining_variance(hessian, feedback, what)
    groups = torch.arange(stacked.shape[1], device=stacked.device) // grid.group_size
    greatest = torch.stack([part.abs().amax(1) for part in stacked.split(grid.group_size, dim=1)], dim=1)
    share = (stacked.abs() / greatest[:, groups].clamp_min(1e-30)).mean(0)
    activation, weight = (_per_channel(values, channel_of) for values in (magnitude.float(), share))
    best, kept = None, None
    for step in range(steps + 1):
        power = step / steps
        for scales in (activation**power, activation**power / weight ** (1 - power)):
            scales = scales / scales.log().mean().exp()
            error = scaled_error(stacked, weights, hessian, left, scales[channel_of], Grid(grid.group_size))
            if best is None or error < best:
                best, kept = error, scales
    if left is not None:
        scales = descend(stacked, weights, left, kept, channel_of, grid.group_size)
        if scaled_error(stacked, weights, hessian, left, scales[channel_of], Grid(grid.group_size)) < best:
            return scales
    return kept


def descend(
    weights: torch.Tensor,
    row_weights: torch.Tensor,
    left: torch.Tensor,
    scales: torch.Tensor,
    channel_of: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """Factors from `scales` on by gradient steps (Adam) on the output error that a quantizer with feedback leaves.

    A weight's rounding error is uniform in a step, so it is proportional to the sum over rows r and groups g of
    w_r range_rg^2 sum_i left_i / s_i^2 for the columns i of the group, with range_rg = max - min of s_i W_ri.
    """
    groups = torch.arange(weights.shape[1], device=weights.device) // group_size
    logarithm = scales.log().requires_grad_()
    optimizer = torch.optim.Adam([logarithm], lr=DESCENT_RATE)
    for _ in range(DESCENT_STEPS):
        # only the ends of a group's range move its error: no gradient has to go through the other columns
        parts = (weights * _centred(logarithm.detach())[channel_of]).split(group_size, dim=1)
        starts = torch.arange(len(parts), device=weights.device) * group_size
        high = torch.stack([part.argmax(1) for part in parts], dim=1) + starts
        low = torch.stack([part.argmin(1) for part in parts], dim=1) + starts
        with torch.enable_grad():
            factors = _centred(logarithm)[channel_of]
            ranges = weights.gather(1, high) * factors[high] - weights.gather(1, low) * factors[low]
            squares = row_weights @ ranges.square()
            optimizer.zero_grad()
            (squares[groups] * left / factors.square()).sum().log().backward()
        optimizer.step()
    return _centred(logarithm.detach())


def _centred(logarithm: torch.Tensor) -> torch.Tensor:
    """Factors with a geometric mean of 1."""
    return (logarithm - logarithm.mean()).exp()


def _sample(matrices: list[torch.Tensor], hessian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all matrices, and a weight for each: one over the squared output of its matrix."""
    every = max(1, sum(map(len, matrices)) // MOST_ROWS)
    rows = [matrix[::every] for matrix in matrices]
    weights = [torch.full((len(part),), 1 / max(float(((part @ hessian) * part).sum()), 1e-30)) for part in rows]
    return torch.cat(rows), torch.cat(weights).to(hessian.device)


def _per_channel(values: torch.Tensor, channel_of: torch.Tensor) -> torch.Tensor:
    """Mean over the columns of each channel, no smaller than a ten-thousandth of the mean of all."""
    sums = torch.zeros(int(channel_of.max()) + 1, device=values.device).index_add_(0, channel_of, values)
    means = sums / torch.bincount(channel_of)
    return means.clamp_min(max(float(means.mean()) * SMALLEST, 1e-30))


def remaining_variance(hessian: torch.Tensor, damping: float, what: str) -> torch.Tensor:
    """Variance of each input given the columns that GPTQ's walk by falling diagonal rounds after it, [in]."""
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor, _ = inverse_factor(hessian[order][:, order], damping, what)
    variance = torch.empty_like(hessian.diagonal())
    variance[order] = factor.diagonal() ** -2
    return variance


def scaled_error(
    weights: torch.Tensor,
    row_weights: torch.Tensor,
    hessian: torch.Tensor,
    left: torch.Tensor | None,
    scales: torch.Tensor,
    grid: Grid,
) -> float:
    """Weighted output error of weights [out, in] rounded to nearest with their columns times `scales`; with `left`
    the variance of each input that counts is that."""
    scaled = weights * scales
    ranges = static_ranges(scaled, grid)
    error = (dequantize(rounded(scaled, *ranges, grid), *ranges, grid.group_size) - scaled) / scales
    spread = (error @ hessian) * error if left is None else error.square() * left
    return float((spread.sum(1) * row_weights).sum(dtype=torch.float64))


def rounded(weights: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Nearest codes uint8 [out, in] for given ranges [out, groups]."""
    codes = torch.empty(weights.shape, dtype=torch.uint8, device=weights.device)
    for group in range(scales.shape[1]):
        columns = slice(group * grid.group_size, (group + 1) * grid.group_size)
        codes[:, columns] = nearest_codes(weights[:, columns], scales[:, group, None], minima[:, group, None])
    return codes


def clipped_ranges(weights: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges of all groups of fp32 weights [out, in], each the best of f * [min, max] for f from 1 down to 0.5.

    Best is the least output error of the group alone, e^T H_gg e with H_gg the group's block of the Hessian.

    Returns:
        scales and minima, fp32 values that are exact in bf16, [out, groups].
    """
    groups = group_count(weights.shape[1], grid.group_size)
    scales = torch.empty(len(weights), groups, device=weights.device)
    minima = torch.empty_like(scales)
    for group in range(groups):
        columns = slice(group * grid.group_size, (group + 1) * grid.group_size)
        part, block, best = weights[:, columns], hessian[columns, columns], None
        for step in range(CLIP_STEPS + 1):
            scale, minimum = find_range(part * (1 - (1 - CLIP_SMALLEST) * step / CLIP_STEPS))
            error = nearest_codes(part, scale[:, None], minimum[:, None]).mul_(scale[:, None]).add_(minimum[:, None])
            error.sub_(part)
            error = ((error @ block) * error).sum(1)
            better = torch.ones_like(error, dtype=torch.bool) if best is None else error < best
            best = error if best is None else torch.where(better, error, best)
            scales[better, group], minima[better, group] = scale[better], minimum[better]
    return scales, minima
