"""The search for trellis codes: Viterbi in each tile, the errors of its columns spread over the columns to come."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from yardstick.quantize.grid import safe_divisor
from yardstick.quantize.hessian import inverse_factor
from yardstick.quantize.trellis import SYMBOL_BITS, TILE_COLUMNS, TILE_ROWS, codebook, rotate, states, tile_counts

# states times sequences of one search: fewer drown in calls, more leave a core's cache
FEWEST_COSTS, MOST_COSTS = 1 << 14, 1 << 17
LAZY_COLUMNS = 128  # as in GPTQ: columns behind these get their corrections in one product


def viterbi(targets: np.ndarray, values: np.ndarray, symbol_bits: int = SYMBOL_BITS) -> np.ndarray:
    """The symbols whose values are nearest, in sum of squares over a sequence, to fp32 targets [steps, sequences].

    `values` are those of all states. With B = 2^symbol_bits values a symbol, a state is (top, low, symbol), most
    significant first: the symbol before it left (low, symbol) as (top, low), so the B states that differ in `top` alone
    lead to the same ones. The search starts in state 0 (Viterbi 1967). Of each step only the least costs of the ways to
    each (top, low) are kept, and the way back is chosen from them: that takes 1 / B of the memory of decisions, and no
    step has to find positions of minima.

    In numpy, since a step is a few operations on some ten thousand numbers, and torch's calls alone take longer. Costs
    lie as [top, symbol, sequence, low], so that each runs over long stretches of memory also for a few sequences.

    Returns:
        uint8 [steps, sequences].
    """
    steps, count = targets.shape
    branches = 1 << symbol_bits
    lows = len(values) // branches**2
    least = np.empty((steps, branches, count, lows), dtype=np.float32)
    of_states = np.empty((branches, branches, count, lows), dtype=np.float32)
    of_states[:] = values.reshape(branches, lows, branches).swapaxes(1, 2)[:, :, None]
    costs = np.empty_like(of_states)
    reached = np.empty_like(costs[0])
    wanted = np.repeat(targets[:, :, None], lows, axis=2)
    least[0] = np.inf
    least[0, 0, :, 0] = 0
    for step in range(steps):
        if step:
            np.minimum.reduce(costs, axis=0, out=reached)
            least[step] = reached.transpose(2, 0, 1).reshape(branches, lows, count).swapaxes(1, 2)
        np.subtract(of_states, wanted[step], out=costs)
        np.multiply(costs, costs, out=costs)
        np.add(costs, least[step][:, None], out=costs)
    state = costs.transpose(0, 3, 1, 2).reshape(-1, count).argmin(0)
    symbols, sequences = np.empty((steps, count), dtype=np.uint8), np.arange(count)
    before = values.reshape(branches, -1)
    for step in range(steps - 1, 0, -1):
        symbols[step] = state % branches
        rest = state // branches  # the low part and the symbol of the state before
        ways = before[:, rest]
        ways -= targets[step - 1]
        ways *= ways
        ways += least[step - 1][:, sequences, rest // branches]
        state = ways.argmin(0) * (branches * lows) + rest
    symbols[0] = state % branches
    return symbols


def search(targets: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Symbols uint8 [sequences, steps] of targets [steps, sequences], in as many threads as torch has."""
    threads, count = torch.get_num_threads(), targets.shape[1]
    at_once = max(FEWEST_COSTS // len(values), min(-(-count // threads), MOST_COSTS // len(values)), 1)
    parts = [part.cpu().numpy() for part in targets.split(at_once, dim=1)]
    of_states = values.cpu().numpy()
    if len(parts) == 1:
        found = [viterbi(parts[0], of_states)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda part: viterbi(part, of_states), parts))
    return torch.from_numpy(np.concatenate(found, axis=1).T.copy()).to(targets.device)


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
            targets = tile.view(TILE_COLUMNS, down, TILE_ROWS).transpose(1, 2).reshape(-1, down)
            found = search(targets, values)
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
