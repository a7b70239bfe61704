"""The packing contract: int4 codes, two a byte, with a bf16 scale and a bf16 minimum per group.

    w[r, c] = codes[r, c] * scales[r, c // g] + minima[r, c // g]

Groups run along the input dimension; the last group of a row may be short. Element 2j of a row is the low nibble of
byte j. With 128 columns a group that is 4 + 32 / 128 = 4.25 bits per weight.

A matrix that asks for more bits is a sum of terms, each of which is one of the contract: the first approximates it, the
next what is left. They are stored with the rows of all terms behind each other, [terms * out, ...], so that the kernels
need not know of them: the sum of their outputs is the matrix's. Two terms have 8.5 bits per weight.
"""

import torch

LEVELS = 15  # codes 0..15
MOST_TERMS = 2


def group_count(in_features: int, group_size: int) -> int:
    """Number of groups in a row, a short last one included."""
    return -(-in_features // group_size)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [out, in] in 0..15 to uint8 [out, ceil(in / 2)], element 2j in the low nibble of byte j."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, in_features: int) -> torch.Tensor:
    """The inverse of `pack_nibbles`: uint8 [out, in_features]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1)
    return codes.reshape(packed.shape[0], -1)[:, :in_features]


def dequantize(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, group_size: int) -> torch.Tensor:
    """Weights of the contract in fp32: codes [out, in], scales and minima [out, groups]."""
    weights = codes.float()
    in_features = codes.shape[1]
    whole = in_features // group_size * group_size
    if whole:
        grouped = weights[:, :whole].unflatten(1, (-1, group_size))
        full = whole // group_size
        grouped.mul_(scales[:, :full, None].float()).add_(minima[:, :full, None].float())
    if whole < in_features:
        weights[:, whole:].mul_(scales[:, -1:].float()).add_(minima[:, -1:].float())
    return weights


def sum_of_terms(stacked: torch.Tensor, terms: int) -> torch.Tensor:
    """[terms * out, ...] to [out, ...]."""
    return stacked if terms == 1 else stacked.unflatten(0, (terms, -1)).sum(0)
