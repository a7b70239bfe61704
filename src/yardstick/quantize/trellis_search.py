"""The search for trellis codes: Viterbi in each tile, the errors of its columns spread over the columns to come."""

from dataclasses import dataclass

import torch

from yardstick.quantize.grid import safe_divisor
from yardstick.quantize.hessian import inverse_factor
from yardstick.quantize.trellis import TILE_COLUMNS, TILE_ROWS, codebook, rotate, states, tile_counts
from yardstick.quantize.viterbi import viterbi

LAZY_COLUMNS = 128  # as in GPTQ: columns behind these get their corrections in one product


@dataclass
class TrellisCodes:
    """Symbols uint8 [tiles down, tiles across, 256], scales bf16 [rows], and the damping that the Hessian needed."""

    symbols: torch.Tensor
    scales: torch.Tensor
    damping: float


def quantize_trellis(
    weights: torch.Tensor, hessian: torch.Tensor, state_bits: int, damping: float, what: str
) -> TrellisCodes:
    """Quantize fp32 weights [out, in] under the Hessian [in, in] of their input; rows are padded to whole tiles.

    In the rotated basis the columns of a tile are coded together. With U the factor of `inverse_factor`, B the columns
    of a tile and L those behind, the error E of the tile is then spread by W_L -= E U_BB^-1 U_BL (the block form of
    GPTQ's and LDLQ's feedback; QTIP, section 3.3). A row's scale is its root mean square.

    Raises:
        YardstickError: the Hessian cannot be factored.
    """
    in_features = weights.shape[1]
    down, across = tile_counts(weights.shape)
    rows = down * TILE_ROWS
    weights = torch.nn.functional.pad(weights, (0, 0, 0, rows - len(weights)))
    values = codebook(state_bits).to(weights.device)
    rotated = rotate(weights)
    scales = rotated.square().mean(1).sqrt().bfloat16()
    columns = torch.zeros(across * TILE_COLUMNS, rows, device=weights.device)  # what pads the width is zero
    columns[:in_features] = (rotated / safe_divisor(scales.float())[:, None]).T
    factor, damping = inverse_factor(rotate(rotate(hessian).T), damping, what)
    symbols = torch.empty(down, across, TILE_COLUMNS * TILE_ROWS, dtype=torch.uint8, device=weights.device)
    for start in range(0, in_features, LAZY_COLUMNS):
        stop = min(start + LAZY_COLUMNS, in_features)
        spread = torch.empty(stop - start, rows, device=weights.device)
        for first in range(start, stop, TILE_COLUMNS):
            last = min(first + TILE_COLUMNS, stop)
            tile = columns[first : first + TILE_COLUMNS]
            targets = tile.view(TILE_COLUMNS, down, TILE_ROWS).transpose(0, 1).reshape(down, -1)
            found = viterbi(targets, values)
            symbols[:, first // TILE_COLUMNS] = found
            restored = values[states(found, state_bits)].view(down, TILE_COLUMNS, TILE_ROWS).transpose(0, 1)
            error = tile - restored.reshape(TILE_COLUMNS, rows)
            own = factor[first:last, first:last]
            spread[first - start : last - start] = torch.linalg.solve_triangular(
                own.T, error[: last - first], upper=False
            )
            columns[last:stop].addmm_(factor[first:last, last:stop].T, spread[first - start : last - start], alpha=-1)
        columns[stop:in_features].addmm_(factor[start:stop, stop:].T, spread, alpha=-1)
    return TrellisCodes(symbols, scales, damping)
