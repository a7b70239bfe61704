"""What the original model's input tells a quantized matrix: targets that make up for errors before it.

The quantized model's input of a matrix is x, the original's is x0. Instead of W x, GPTQ should aim at W x0 (GPTAQ,
Li et al. 2025, arXiv 2504.02692; Qronos, Zhang et al. 2025, arXiv 2505.11695). Least squares of the outputs,
min |W x0 - W' x|^2, gives the target W' = W + W E[(x0 - x) x^T] H^-1 with H = E[x x^T]. A matrix whose output is added to the residual
stream r can also make up for what is wrong there: + E[(r0 - r) x^T] H^-1. Both corrections are learned from the
calibration text, so each has a strength between 0 and 1.
"""

import torch

from yardstick.quantize.hessian import Hessian


class Drift:
    """Moments of a matrix's input over calibration tokens: the Hessian and E[(x0 - x) x^T], E[(r0 - r) x^T], fp32."""

    def __init__(self, features: int, device: torch.device | None = None) -> None:
        self.hessian = Hessian(features, device)
        self.inputs = torch.zeros(features, features, device=device)
        self.residual: torch.Tensor | None = None

    def add(self, before: torch.Tensor, after: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Take in the original's and the quantized model's inputs [..., features], and r0 - r [..., hidden]."""
        self.hessian.add(after)
        after = after.reshape(-1, after.shape[-1])
        self.inputs.addmm_((before.reshape(after.shape) - after).T, after)
        if residual is not None:
            residual = residual.reshape(len(after), -1)
            if self.residual is None:
                self.residual = torch.zeros(residual.shape[1], after.shape[1], device=after.device)
            self.residual.addmm_(residual.T, after)

    def target(self, weights: torch.Tensor, factor: torch.Tensor, inputs: float, residual: float) -> torch.Tensor:
        """W' [out, in] of fp32 weights, for U of H^-1 = U^T U and the strengths of the two corrections."""
        moved = weights @ self.inputs * inputs
        if self.residual is not None:
            moved += self.residual * residual
        return weights + (moved / self.hessian.tokens) @ factor.T @ factor
