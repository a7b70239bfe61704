"""What the original model's input tells a quantized matrix: targets that make up for the errors before it.

The quantized model's input of a matrix is x, the original's is x0. A matrix should give W x0 of it, not W x (GPTAQ,
Li et al. 2025, arXiv 2504.02692; Qronos, Zhang et al. 2025, arXiv 2505.11695); where its output is added to the
residual stream r, it should also give what is missing there, r0 - r. With m = W (x0 - x), or m = W (x0 - x) + r0 - r,
the target of least squared error is W' = W + E[m x^T] H^-1, H = E[x x^T].

That fits the calibration text far better than other text. So H gets a ridge, and the correction a strength from
cross-validation: a correction D is learned from each half of the sequences, and the strength s is the one that leaves
least of |m - s D x|^2 in the other half. Learned from all sequences the correction is less noisy, by the formula of
Spearman and Brown, and gets the strength 2 s / (1 + s).
"""

import torch

from yardstick.quantize.hessian import Hessian, inverse_factor

RIDGE = 1.0  # added to the diagonal of H, as a share of its mean


class Drift:
    """Moments of what a matrix reads in each half of the calibration text: H, E[(x0 - x) x^T] and E[(r0 - r) x^T]."""

    def __init__(self, features: int, device: torch.device | None = None) -> None:
        self.halves = [Moments(features, device) for _ in range(2)]
        self.added = 0

    def add(
        self, after: torch.Tensor, before: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> None:
        """Take in the quantized model's inputs x and the original's x0 [..., features], and r0 - r [..., hidden].

        Calls go to the halves in turn. Without x0 there is no correction.
        """
        self.halves[self.added % 2].add(after, before, residual)
        self.added += 1

    def hessian(self, what: str) -> torch.Tensor:
        """H over all tokens; for errors see `Hessian.mean`."""
        whole = Hessian(len(self.halves[0].inputs), self.halves[0].inputs.device)
        whole.matrix = self.halves[0].hessian.matrix + self.halves[1].hessian.matrix
        whole.tokens = self.halves[0].hessian.tokens + self.halves[1].hessian.tokens
        return whole.mean(what)

    def target(self, weights: torch.Tensor, what: str) -> tuple[torch.Tensor, float]:
        """W' [out, in] of fp32 weights, and the strength of the correction: 0 where it would not hold elsewhere."""
        missing = [half.missing(weights) for half in self.halves]
        if not any(bool(part.any()) for part in missing):
            return weights, 0.0
        agreement = size = 0.0
        for (learned, learner), (checked, checker) in (
            ((missing[0], self.halves[0]), (missing[1], self.halves[1])),
            ((missing[1], self.halves[1]), (missing[0], self.halves[0])),
        ):
            correction = solve(learned, learner.hessian.matrix, what)
            agreement += float((correction * checked).sum(dtype=torch.float64))
            spread = (correction @ checker.hessian.matrix) * correction
            size += float(spread.sum(dtype=torch.float64))
        strength = min(max(agreement / size, 0.0), 1.0) if size > 0 else 0.0
        strength = 2 * strength / (1 + strength)
        if strength == 0:
            return weights, 0.0
        whole = self.halves[0].hessian.matrix + self.halves[1].hessian.matrix
        return weights + strength * solve(missing[0] + missing[1], whole, what), strength


class Moments:
    """Sums over tokens of x x^T, (x0 - x) x^T and, once it is given, (r0 - r) x^T; fp32."""

    def __init__(self, features: int, device: torch.device | None = None) -> None:
        self.hessian = Hessian(features, device)
        self.inputs = torch.zeros(features, features, device=device)
        self.residual: torch.Tensor | None = None

    def add(self, after: torch.Tensor, before: torch.Tensor | None, residual: torch.Tensor | None) -> None:
        """Take in tokens; see `Drift.add`."""
        self.hessian.add(after)
        after = after.reshape(-1, after.shape[-1])
        if before is not None:
            self.inputs.addmm_((before.reshape(after.shape) - after).T, after)
        if residual is not None:
            residual = residual.reshape(len(after), -1)
            if self.residual is None:
                self.residual = torch.zeros(residual.shape[1], after.shape[1], device=after.device)
            self.residual.addmm_(residual.T, after)

    def missing(self, weights: torch.Tensor) -> torch.Tensor:
        """Sum of m x^T, [out, in]."""
        missing = weights @ self.inputs
        return missing if self.residual is None else missing.add_(self.residual)


def solve(missing: torch.Tensor, hessian: torch.Tensor, what: str) -> torch.Tensor:
    """missing (H + ridge)^-1, fp32 [out, in]."""
    factor, _ = inverse_factor(hessian, RIDGE, what)
    return missing @ factor.T @ factor
