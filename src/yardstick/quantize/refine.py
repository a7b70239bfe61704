"""Ranges and codes fitted to the Hessian: search of ranges, least squares of ranges, coordinate descent of codes.

All of them lower the output error of a row, (w - ŵ) H (w - ŵ)^T, in which rows are independent. GPTQ rounds once,
column by column, and never looks back; its ranges are chosen before any code is known.
"""

import itertools

import torch

from yardstick.quantize.gptq import Quantized, gptq
from yardstick.quantize.grid import SMALLEST_NORMAL, Grid, nearest_codes, safe_divisor
from yardstick.quantize.hessian import inverse_factor
from yardstick.quantize.pack import LEVELS, dequantize, group_count

SHRUNKEN = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # ends of trial ranges, as shares of the group's
MOVES = (1 / 20, 1 / 40, 1 / 80)  # of an end of the best range, as shares of the group's range
RIDGE = 1e-6  # share of its own diagonal that is added to a row's normal equations
ROWS_AT_ONCE, REFINED_ROWS = 1024, 4096
BLOCK_COLUMNS = 128


def fit(weights: torch.Tensor, hessian: torch.Tensor, grid: Grid, damping: float, rounds: int, what: str) -> Quantized:
    """Quantize fp32 weights [out, in]: search ranges, walk with GPTQ in act-order, refine.

    Raises:
        YardstickError: the Hessian cannot be factored.
    """
    factor, damping = inverse_factor(hessian, damping, what)
    scales, minima = search_ranges(weights, price(factor), grid.group_size)
    codes = gptq(weights, hessian, grid, True, damping, what, (scales, minima)).codes
    refined = refine(weights, codes, scales, minima, damped(hessian, damping), grid.group_size, rounds)
    return Quantized(*refined, damping)


def damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """H + damping * mean(diag H) * I, without the columns that nothing excites, which get a diagonal of 1."""
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    added = damping * diagonal[~dead].mean() + dead.to(hessian.dtype)
    return hessian + torch.diag(added)


def price(factor: torch.Tensor) -> torch.Tensor:
    """What an error in each column costs once all others have made up for it: 1 / diag(H^-1), fp32 [in].

    Takes U of H^-1 = U^T U, see `hessian.inverse_factor`. GPTQ pays this for the column that it walks first (Optimal
    Brain Surgeon, Hassibi and Stork 1992).
    """
    return 1 / factor.square().sum(0)


def search_ranges(
    weights: torch.Tensor, importance: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima, fp32 exact in bf16 [out, groups], of least sum of importance * (w - ŵ)^2 in each group.

    Low and high end are searched each by itself: 6 x 6 ranges whose ends are 1.0 to 0.5 times those of the group, then
    the eight neighbours of the best one at 1/20, 1/40 and 1/80 of the group's range.
    """
    out_features, in_features = weights.shape
    groups = group_count(in_features, group_size)
    scales = torch.empty(out_features, groups, device=weights.device)
    minima = torch.empty_like(scales)
    for group in range(groups):
        columns = slice(group * group_size, (group + 1) * group_size)
        for start in range(0, out_features, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            scales[rows, group], minima[rows, group] = _search(weights[rows, columns].contiguous(), importance[columns])
    return scales, minima


def _search(weights: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = weights.amin(-1), weights.amax(-1)
    middle, step = (low + high) / 2, (high - low) / LEVELS
    scale, minimum, least = step, low, torch.full_like(low, torch.inf)

    def attempt(trial_step: torch.Tensor, trial_low: torch.Tensor) -> None:
        nonlocal scale, minimum, least
        trial_scale, trial_minimum = bf16_range(trial_step, trial_low, middle)
        restored = nearest_codes(weights, trial_scale[:, None], trial_minimum[:, None])
        restored.mul_(trial_scale[:, None]).add_(trial_minimum[:, None])
        error = restored.sub_(weights).square_() @ importance
        better = error < least
        least = torch.where(better, error, least)
        scale, minimum = torch.where(better, trial_scale, scale), torch.where(better, trial_minimum, minimum)

    for low_factor, high_factor in itertools.product(SHRUNKEN, repeat=2):
        attempt((high * high_factor - low * low_factor) / LEVELS, low * low_factor)
    for move in MOVES:
        centre, base = scale, minimum
        for low_move, high_move in itertools.product((-move, 0.0, move), repeat=2):
            if low_move or high_move:
                attempt(centre + (high_move - low_move) * step, base + low_move * LEVELS * step)
    return scale, minimum


def bf16_range(scale, minimum, constant) -> tuple[torch.Tensor, torch.Tensor]:
    """A range rounded to bf16, in fp32; one with too small a step is a constant."""
    scale = scale.bfloat16().float()
    scale = torch.where(scale < SMALLEST_NORMAL, torch.zeros_like(scale), scale)
    return scale, torch.where(scale == 0, constant, minimum).bfloat16().float()


def refine(
    weights: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    hessian: torch.Tensor,
    group_size: int,
    rounds: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Alternate least squares of ranges and coordinate descent of codes; no row's output error ever rises.

    Takes fp32 weights [out, in], the Hessian [in, in], codes uint8 [out, in], and scales and minima [out, groups]
    that are exact in bf16. Returns codes uint8, scales and minima bf16.
    """
    results = []
    for start in range(0, len(weights), REFINED_ROWS):  # rows are independent; blocks bound the memory
        rows = slice(start, start + REFINED_ROWS)
        block = Rows(weights[rows], codes[rows], scales[rows].float(), minima[rows].float(), hessian, group_size)
        for _ in range(rounds):
            block.keep(block.codes, *block.refitted_ranges())
            block.keep(block.descended_codes(), block.scales, block.minima)
        results.append((block.codes, block.scales.bfloat16(), block.minima.bfloat16()))
    codes, scales, minima = (torch.cat(parts) for parts in zip(*results, strict=True))
    return codes, scales, minima


class Rows:
    """Rows of a matrix with the best codes and ranges so far, and half the gradient of their output error, (w - ŵ) H.

    The output error of a row is (w - ŵ) H (w - ŵ)^T.
    """

    def __init__(self, weights, codes, scales, minima, hessian, group_size: int) -> None:
        self.weights, self.hessian, self.group_size = weights, hessian, group_size
        self.codes, self.scales, self.minima = codes, scales, minima
        self.error, self.pull = self.measure(codes, scales, minima)

    def measure(self, codes, scales, minima) -> tuple[torch.Tensor, torch.Tensor]:
        """Output error fp64 [rows] and (w - ŵ) H [rows, in]."""
        difference = self.weights - dequantize(codes, scales, minima, self.group_size)
        pull = difference @ self.hessian
        return (pull * difference).sum(-1, dtype=torch.float64), pull

    def keep(self, codes, scales, minima) -> None:
        """Take over the rows whose output error is lower so."""
        error, pull = self.measure(codes, scales, minima)
        better = error < self.error
        self.error, column = torch.where(better, error, self.error), better[:, None]
        self.pull = torch.where(column, pull, self.pull)
        self.codes = torch.where(column, codes, self.codes)
        self.scales = torch.where(column, scales, self.scales)
        self.minima = torch.where(column, minima, self.minima)

    def refitted_ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and minima, fp32 exact in bf16, of least output error for the codes: all groups of a row jointly.

        With B [in, 2 groups] the codes and the ones of each group, the correction x solves B^T H B x = B^T H (w - ŵ).
        It is then rounded to bf16, one value after the other, each error spread over the values to come as GPTQ
        spreads those of weights. A row whose equations cannot be solved keeps its ranges.
        """
        normal, right = self.normal_equations()
        diagonal = normal.diagonal(dim1=1, dim2=2)
        unit = torch.where(diagonal > 0, diagonal, 1).rsqrt()  # in these units the diagonal is 1
        normal = normal * unit[:, :, None] * unit[:, None, :]
        normal.diagonal(dim1=1, dim2=2).fill_(1 + RIDGE)
        lower, failed = torch.linalg.cholesky_ex(normal)
        lower[failed != 0] = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
        values = torch.cat((self.scales, self.minima), 1).double() / unit
        values += torch.cholesky_solve((right * unit)[:, :, None], lower)[:, :, 0]
        factor, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        found = torch.empty_like(values)
        for i in range(values.shape[1]):
            found[:, i] = (values[:, i] * unit[:, i]).bfloat16().double()
            error = (values[:, i] - found[:, i] / unit[:, i]) / factor[:, i, i]
            values[:, i + 1 :] -= error[:, None] * factor[:, i, i + 1 :]
        scales, minima = found.float().chunk(2, dim=1)
        usable = (failed == 0) & (failed_too == 0) & found.isfinite().all(1) & (scales >= 0).all(1)
        return (
            torch.where(usable[:, None], scales, self.scales),
            torch.where(usable[:, None], minima, self.minima),
        )

    def normal_equations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """B^T H B [rows, 2 groups, 2 groups] and B^T H (w - ŵ) [rows, 2 groups], fp64: scales first, then minima."""
        (rows, in_features), groups = self.codes.shape, self.scales.shape[1]
        starts = range(0, in_features, self.group_size)
        spans = [slice(start, min(start + self.group_size, in_features)) for start in starts]
        codes, hessian = self.codes.float(), self.hessian
        normal = torch.empty(rows, 2 * groups, 2 * groups, dtype=torch.float64, device=codes.device)
        right = torch.empty(rows, 2 * groups, dtype=torch.float64, device=codes.device)
        for i, span in enumerate(spans):
            right[:, i] = torch.linalg.vecdot(self.pull[:, span], codes[:, span])
            right[:, groups + i] = self.pull[:, span].sum(-1)
            along, ones = codes[:, span] @ hessian[span], hessian[span].sum(0)
            for j, other in enumerate(spans):
                normal[:, i, j] = torch.linalg.vecdot(along[:, other], codes[:, other])
                normal[:, i, groups + j] = normal[:, groups + j, i] = along[:, other].sum(-1)
                normal[:, groups + i, groups + j] = ones[other].sum()
        return (normal + normal.mT) / 2, right

    def descended_codes(self) -> torch.Tensor:
        """Codes uint8 after one sweep of coordinate descent: each in turn the best one for all the others."""
        in_features, size, hessian = self.weights.shape[1], self.group_size, self.hessian
        # transposed, so that a column is contiguous memory
        target, codes = self.weights.T.contiguous(), self.codes.T.contiguous()
        difference = target - dequantize(self.codes, self.scales, self.minima, size).T
        scales, minima, curvature = self.scales.T.contiguous(), self.minima.T.contiguous(), hessian.diagonal().tolist()
        divisors = safe_divisor(scales)
        for start in range(0, in_features, BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, in_features)
            pull = hessian[start:stop] @ difference
            for column in range(start, stop):
                i, group = column - start, column // size
                scale, minimum = scales[group], minima[group]
                # the value at which the error of this row is least while all its others stay
                ideal = (target[column] - difference[column]).add_(pull[i], alpha=1 / curvature[column])
                best = ideal.sub_(minimum).div_(divisors[group]).round_().clamp_(0, LEVELS)
                codes[column] = best
                after = target[column] - best.mul_(scale).add_(minimum)
                change = after - difference[column]
                difference[column] = after
                if column + 1 < stop:
                    pull[i + 1 :].addr_(hessian[column, column + 1 : stop], change)
        return codes.T.contiguous()
