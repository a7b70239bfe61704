"""The second-moment matrix of a layer's input, and the triangular factor that GPTQ walks along."""

import torch

from yardstick.errors import YardstickError

DAMPING_RAISE, DAMPING_CAP = 10.0, 1.0


class Hessian:
    """H = sum of x x^T over calibration tokens, in fp32 (the factor 2 / N of the loss changes nothing)."""

    def __init__(self, features: int, device: torch.device | None = None) -> None:
        self.matrix = torch.zeros(features, features, device=device)
        self.tokens = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Take in inputs [..., features]."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        self.matrix.addmm_(flat.T, flat)
        self.tokens += len(flat)

    def mean(self, what: str) -> torch.Tensor:
        """H / tokens.

        Raises:
            YardstickError: no token was seen, or H is not finite or all zero; more damping would cure none of these.
        """
        if self.tokens == 0:
            raise YardstickError(f"{what}: no calibration token reached this matrix")
        matrix = self.matrix / self.tokens
        if not bool(torch.isfinite(matrix).all()):
            raise YardstickError(f"{what}: the Hessian is not finite; an activation of the calibration text overflowed")
        if float(matrix.diagonal().sum()) <= 0:
            raise YardstickError(f"{what}: the Hessian is zero; the calibration text never excites this matrix")
        return matrix


def inverse_factor(hessian: torch.Tensor, damping: float, what: str) -> tuple[torch.Tensor, float]:
    """Upper Cholesky factor U of (H + damping * mean(diag H) * I)^-1 = U^T U, in fp32, and the damping that was used.

    Factored in fp64. A column that calibration never excites (zero diagonal) gets a diagonal of 1, so it is rounded
    on its own: zeroing it, as some codes do, would lose weight that other text may use. Where H is not positive
    definite the damping is raised tenfold, up to 1.

    Raises:
        YardstickError: not positive definite even then.
    """
    matrix = hessian.double()
    dead = matrix.diagonal() == 0
    mean_diagonal = float(matrix.diagonal()[~dead].mean())
    matrix = matrix + torch.diag(dead.double())
    identity = torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    while True:
        damped = matrix + damping * mean_diagonal * identity
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper.float(), damping
        if damping >= DAMPING_CAP:
            raise YardstickError(f"{what}: the Hessian is not positive definite even with damping {damping:g}")
        damping = min(damping * DAMPING_RAISE, DAMPING_CAP) if damping > 0 else 1e-4
