"""Orthogonal matrices whose entries are all of one size, or nearly: what spreads an outlier over all channels.

A Hadamard matrix H of order n has entries of 1 and -1 and H H^T = n I. Orders are built from Paley's two constructions
(q + 1 for a prime q = 3 mod 4, 2 (q + 1) for a prime q = 1 mod 4) and doubled by Sylvester's: 576 is
16 * 36 with q = 17.
"""

import math

import torch


def hadamard(order: int) -> torch.Tensor | None:
    """A Hadamard matrix, fp64 [order, order]; None where these constructions give none of that order."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 2 == 0:
        half = hadamard(order // 2)
        if half is not None:
            return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), half)
    if order % 4 == 0 and _is_prime(order - 1):  # which is 3 mod 4
        border = _bordered(order - 1)
        return border + torch.eye(order, dtype=torch.float64)
    if order % 4 == 0 and _is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
        border, one = _bordered(order // 2 - 1), torch.eye(order // 2, dtype=torch.float64)
        plus, minus = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]], dtype=torch.float64)
        return torch.kron(border, plus) + torch.kron(one, minus)
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _bordered(q: int) -> torch.Tensor:
    """Paley's conference matrix of order q + 1: 0 on the diagonal, and the quadratic characters of i - j mod q."""
    squares = {i * i % q for i in range(1, q)}
    character = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)], dtype=torch.float64)
    index = torch.arange(q)
    matrix = torch.ones(q + 1, q + 1, dtype=torch.float64)
    matrix[1:, 1:] = character[(index[:, None] - index[None]) % q]
    matrix[1:, 0] = 1.0 if q % 4 == 1 else -1.0
    matrix[0, 0] = 0.0
    return matrix


class Rotation:
    """A randomized Hadamard rotation of `width` channels: x R with R = diag(signs) (A kron B) / sqrt(width).

    Where there is no Hadamard matrix of that width, its odd part gets a random orthogonal matrix in A. The product is
    done factor by factor, so R is never held: width * (a + b) steps a row instead of width^2.
    """

    def __init__(self, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
        odd = width
        while odd % 2 == 0:
            odd //= 2
        core = next((odd * 2**i for i in range(4) if width % (odd * 2**i) == 0 and hadamard(odd * 2**i) is not None), 0)
        left = core or odd
        while left * left < width and width // left % 2 == 0:
            left *= 2
        if core:
            outer = hadamard(left) / left**0.5
        else:
            random = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
            outer = torch.kron(torch.linalg.qr(random)[0], hadamard(left // odd) / (left // odd) ** 0.5)
        inner = hadamard(width // left) / (width // left) ** 0.5
        self.width, self._signs = width, signs.float()
        self._outer, self._inner = outer.T.contiguous().float(), inner.float()

    def of_columns(self, matrix: torch.Tensor) -> torch.Tensor:
        """matrix R in fp32, for a last dimension that is `width` or several heads of it."""
        signed = matrix.float().unflatten(-1, (-1, self.width)) * self._signs
        blocks = signed.unflatten(-1, (len(self._outer), len(self._inner)))
        return (self._outer @ (blocks @ self._inner)).reshape(matrix.shape)

    def of_rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """R^T matrix in fp32, for a first dimension that is `width` or several heads of it."""
        return self.of_columns(matrix.T.contiguous()).T.contiguous()
