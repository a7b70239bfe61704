"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): round column by column, spread each error over the columns to come.

With U the upper Cholesky factor of the damped inverse Hessian, column i is rounded to q, and every later column j
gets w_j -= (w_i - q) / U_ii * U_ij. Columns are walked in blocks: inside a block the update is immediate, the rest of
the matrix gets it once a block, as one matrix product.
"""

from dataclasses import dataclass

import torch

from yardstick.quantize.grid import Grid, find_range, nearest_codes, static_ranges
from yardstick.quantize.hessian import inverse_factor
from yardstick.quantize.pack import group_count

BLOCK_COLUMNS = 128  # about; a block always holds whole groups


@dataclass
class Quantized:
    """Codes uint8 [out, in], scales and minima bf16 [out, groups], and the damping that the Hessian needed."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor
    damping: float


def gptq(
    weights: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    act_order: bool,
    damping: float,
    what: str,
    ranges: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Quantized:
    """Quantize fp32 weights [out, in] under the Hessian [in, in] of their input.

    A group's range is taken when the walk reaches its first column, from weights that already carry the errors of
    the columns before. With `act_order` columns are walked by falling Hessian diagonal, and ranges are static (taken
    from the original weights), so that groups stay contiguous and the packing needs no index. `ranges`, scales and
    minima fp32 [out, groups] that are exact in bf16, are used as they are.

    Raises:
        YardstickError: the Hessian cannot be factored.
    """
    out_features, in_features = weights.shape
    order = torch.arange(in_features, device=weights.device)
    if act_order:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    if ranges or act_order:
        scales, minima = ranges or static_ranges(weights, grid)
    else:
        groups = group_count(in_features, grid.group_size)
        scales = torch.empty(out_features, groups, device=weights.device)
        minima = torch.empty_like(scales)
    factor, damping = inverse_factor(hessian[order][:, order], damping, what)
    # transposed, so that a column is contiguous memory
    columns = weights.T[order].contiguous()
    codes = torch.empty_like(columns, dtype=torch.uint8)
    group_of = (order // grid.group_size).tolist()
    # whole groups, so that a group's range is taken from weights that carry all errors before it
    block_columns = max(1, BLOCK_COLUMNS // grid.group_size) * grid.group_size
    for start in range(0, in_features, block_columns):
        stop = min(start + block_columns, in_features)
        block = columns[start:stop]
        errors = torch.empty_like(block)
        for i in range(stop - start):
            column, group = start + i, group_of[start + i]
            if not (ranges or act_order) and column % grid.group_size == 0:
                members = columns[column : column + grid.group_size]
                scales[:, group], minima[:, group] = find_range(members.T.contiguous(), grid.mse)
            scale, minimum = scales[:, group], minima[:, group]
            column_codes = nearest_codes(block[i], scale, minimum)
            codes[column] = column_codes
            error = block[i].sub(column_codes.mul_(scale).add_(minimum)).div_(factor[column, column])
            errors[i] = error
            if i + 1 < stop - start:
                block[i + 1 :].addr_(factor[column, column + 1 : stop], error, alpha=-1)
        if stop < in_features:
            columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    restored = torch.empty_like(codes)
    restored[order] = codes
    return Quantized(restored.T.contiguous(), scales.bfloat16(), minima.bfloat16(), damping)


def error_report(
    weights: torch.Tensor,
    restored: torch.Tensor,
    nearest: torch.Tensor,
    hessian: torch.Tensor,
    target: torch.Tensor | None = None,
) -> dict[str, float]:
    """Errors of a quantized matrix beside those of round-to-nearest, for the checkpoint's record.

    Output errors are those to `target`, a matrix that was aimed at in the place of `weights`, where there is one.
    """
    aim = weights if target is None else target
    return {
        "output_error": output_error(aim, restored, hessian),
        "output_error_rtn": output_error(aim, nearest, hessian),
        "weight_error": float((weights - restored).square().sum(dtype=torch.float64)),
        "weight_error_rtn": float((weights - nearest).square().sum(dtype=torch.float64)),
    }


def output_error(weights: torch.Tensor, restored: torch.Tensor, hessian: torch.Tensor) -> float:
    """Mean squared output error on the calibration data, summed over outputs: tr((W - Ŵ) H (W - Ŵ)^T)."""
    difference = weights - restored
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))
