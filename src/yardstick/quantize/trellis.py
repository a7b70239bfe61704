"""The trellis format: four bits a weight through a sliding window, in a rotated basis, with a bf16 scale a row.

    W = diag(scales) C R,    C[r, j] = codebook[state]

The format follows trellis-coded quantization as in QTIP (Tseng et al. 2024, arXiv 2406.11235) and EXL3, with tables
small enough for a search on a CPU:

- A state is the last `state_bits` bits of a sequence of 4-bit symbols, so each new symbol shifts in one of 16 values,
  and each value is reached from 16 states (the bit-shift trellis). Before a sequence lie zeros: nothing is stored for
  its start, and any sequence can be decoded alone.
- The codebook is computed: one integer product orders the states along a normal distribution, so that the 16 values
  that follow a state, and those that lead to one, are spread over all of it.
- A sequence is a tile of 64 rows and 4 columns, one column after the other. A matrix is padded to whole tiles, and the
  padding is stored.
- R makes the weights of a row look like independent normal numbers: random signs, then a Hadamard transform of the
  largest power of two in the width, then a Hartley transform of what is left of it. It is orthogonal, needs nothing
  stored, and works on the inputs only: rows stay apart, so a head can be read by rows.
"""

import functools

import torch

from yardstick.quantize.pack import unpack_nibbles

SYMBOL_BITS = 4
TILE_ROWS, TILE_COLUMNS = 64, 4
SEQUENCE = TILE_ROWS * TILE_COLUMNS
# state bits -> multiplier, and standard deviation of the normal distribution that the values follow: those of least
# error on normal numbers of deviation 1 among some that were tried (docs/log.md)
CODEBOOKS = {8: (49, 1.16), 10: (67, 1.14), 12: (265, 1.12), 14: (1043, 1.08), 16: (4135, 1.05)}


def codebook(state_bits: int) -> torch.Tensor:
    """Values of all states, fp32 numbers that are exact in fp16: deviation times the normal quantiles of
    (multiplier * state mod 2^state_bits + 1/2) / 2^state_bits."""
    (multiplier, deviation), count = CODEBOOKS[state_bits], 1 << state_bits
    order = torch.arange(count) * multiplier % count
    return (deviation * torch.special.ndtri((order.double() + 0.5) / count)).half().float()


def states(symbols: torch.Tensor, state_bits: int) -> torch.Tensor:
    """States int32 [..., n] of sequences of symbols [..., n]: the last `state_bits` bits up to each, zeros before."""
    found = torch.zeros(symbols.shape, dtype=torch.int32, device=symbols.device)
    for back in range(min(-(-state_bits // SYMBOL_BITS), symbols.shape[-1])):
        found[..., back:] |= symbols[..., : symbols.shape[-1] - back].int() << (SYMBOL_BITS * back)
    return found & ((1 << state_bits) - 1)


def tile_counts(shape: tuple[int, int]) -> tuple[int, int]:
    """Tiles of a matrix [out, in], down and across."""
    return -(-shape[0] // TILE_ROWS), -(-shape[1] // TILE_COLUMNS)


def dequantize(packed: torch.Tensor, scales: torch.Tensor, in_features: int, state_bits: int) -> torch.Tensor:
    """fp32 weights [out, in] in the model's own basis.

    Args:
        packed: uint8 [tiles down, tiles across, 128], two symbols a byte, the first in the low nibble.
        scales: bf16 [out]; rows of the last tiles beyond them are padding.
        in_features: columns; those beyond them are padding.
    """
    symbols = unpack_nibbles(packed.flatten(0, 1), SEQUENCE)
    values = codebook(state_bits).to(packed.device)[states(symbols, state_bits)]
    tiles = values.view(*packed.shape[:2], TILE_COLUMNS, TILE_ROWS)
    matrix = tiles.permute(0, 3, 1, 2).reshape(packed.shape[0] * TILE_ROWS, -1)[: len(scales), :in_features]
    return unrotate(matrix * scales[:, None].float())


def rotate(matrix: torch.Tensor) -> torch.Tensor:
    """M R^T for fp32 M [rows, width]: each row in the basis that the trellis codes."""
    return _transform(matrix * _signs(matrix.shape[1]).to(matrix.device))


def unrotate(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`, M R."""
    return _transform(matrix) * _signs(matrix.shape[1]).to(matrix.device)


def _signs(width: int) -> torch.Tensor:
    """fp32 -1 or 1 for each column: a bit of a hash of its number."""
    mask = (1 << 32) - 1
    hashed = torch.arange(1, width + 1) * 0x9E3779B1 & mask
    hashed = (hashed ^ hashed >> 15) * 0x5BD1E995 & mask
    hashed = (hashed ^ hashed >> 13) * 0x5BD1E995 & mask
    return 1.0 - 2.0 * (hashed >> 31).float()


def _transform(matrix: torch.Tensor) -> torch.Tensor:
    """Rows through (Hartley of the odd part of the width) x (Hadamard of its power of two), which is its own inverse.

    Entries of a Hartley transform of order m are (cos a + sin a) / sqrt(m), a = 2 pi j k / m: none is above
    sqrt(2 / m), and it exists for every m, where Hadamard matrices do not. It is summed term by term, not as a matrix
    product: a row then does not depend on how many are decoded with it.
    """
    rows, width = matrix.shape
    power = width & -width
    odd, half = width // power, 1
    while half < power:
        pairs = matrix.reshape(-1, 2, half)
        matrix = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        half *= 2
    matrix = matrix.reshape(rows, odd, power)
    if odd > 1:
        steps = torch.arange(odd)
        angles = (steps[:, None] * steps % odd).double() * (2 * torch.pi / odd)
        hartley = (angles.cos() + angles.sin()).float().to(matrix.device)
        terms = (hartley[:, i, None] * matrix[:, i : i + 1] for i in range(odd))
        matrix = functools.reduce(torch.Tensor.add_, terms)
    return matrix.reshape(rows, width) / width**0.5
