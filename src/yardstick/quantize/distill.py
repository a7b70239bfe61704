"""Distil what a packed matrix may vary against the original's output distribution.

The loss is KL(teacher || student) over the whole vocabulary, the mean over all positions. With codes frozen, scales and
minima are learned, as in the end-to-end phase of EfficientQAT (Chen et al. 2024, arXiv 2407.11062) and in mlx-lm's DWQ.
With W = code * s + m, the gradients of a group follow from that of its weights:

    dL/ds = sum_g dL/dW * code,   dL/dm = sum_g dL/dW.

They are kept in fp32 and rounded to bf16 in the forward; the gradient passes the rounding unchanged. A dense gradient
of one matrix at a time is reduced to its groups as soon as it is there.
"""

import math

import torch

from yardstick.quantize.pack import LEVELS, dequantize, sum_of_terms

MIDDLE = LEVELS / 2
BETAS, EPSILON = (0.9, 0.95), 1e-12
WARM_UP, LEAST_SHARE = 16, 0.05
TILE_BYTES = 25_000_000  # of one tile of logits: malloc hands back less than 32 MiB without new pages


class Matrix:
    """A packed matrix whose scales and minima are learned; called like a linear layer.

    Args:
        codes: uint8 [out, in]; of several terms, here and below, the rows of each behind each other.
        scales, minima: fp32 [out, groups].
        scale_gradients, minimum_gradients: fp32 [out, groups], to which the backward adds.
    """

    def __init__(self, codes, scales, minima, scale_gradients, minimum_gradients, group_size: int, terms=1) -> None:
        self.codes, self.group_size, self.terms = codes, group_size, terms
        self.scales, self.minima = scales, minima
        self.scale_gradients, self.minimum_gradients = scale_gradients, minimum_gradients

    def dense(self) -> torch.Tensor:
        """fp32 [out, in], of the values that would be stored."""
        values = dequantize(self.codes, self.scales.bfloat16(), self.minima.bfloat16(), self.group_size)
        return sum_of_terms(values, self.terms)

    def learn(self, gradient: torch.Tensor) -> None:
        """Add what a gradient dL/dW [out, in] is for the groups; the gradient is used up."""
        if self.terms > 1:
            gradient = gradient.repeat(self.terms, 1)
        self.minimum_gradients += group_sums(gradient, self.group_size)
        self.scale_gradients += group_sums(gradient.mul_(self.codes), self.group_size)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Product.apply(inputs, self)


class _Product(torch.autograd.Function):
    """inputs @ W^T; keeps the inputs only, and spells W out again in the backward."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.matrix = matrix
        return inputs @ matrix.dense().T

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (inputs,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        back = gradient @ ctx.matrix.dense()
        ctx.matrix.learn(gradient.flatten(0, -2).T @ inputs.flatten(0, -2))
        return back, None


def group_sums(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Sums over the groups of a row: [out, in] to [out, groups]; the last group may be short."""
    whole = values.shape[1] // group_size * group_size
    sums = []
    if whole:
        sums.append(values[:, :whole].unflatten(1, (-1, group_size)).sum(-1))
    if whole < values.shape[1]:
        sums.append(values[:, whole:].sum(-1, keepdim=True))
    return torch.cat(sums, dim=1)


def kl_divergence(
    teacher_states: torch.Tensor,
    teacher_head: torch.Tensor,
    states: torch.Tensor,
    head: torch.Tensor,
    head_gradient: torch.Tensor | None = None,
    with_gradient: bool = True,
) -> tuple[float, torch.Tensor | None]:
    """Mean KL(softmax(teacher_states @ teacher_head^T) || softmax(states @ head^T)), and its gradient for the states.

    Args:
        teacher_states, states: final-normed states fp32 [positions, hidden].
        teacher_head, head: fp32 [vocab, hidden].
        head_gradient: fp32 [vocab, hidden], to which the gradient of `head` is added, where it is wanted.

    Logits are held for a tile of positions only. With q the student's distribution, dKL/dlogits = q - p.
    """
    positions = len(states)
    total, gradient = 0.0, torch.empty_like(states) if with_gradient else None
    tile = max(1, TILE_BYTES // (4 * len(head)))
    for start in range(0, positions, tile):
        rows = slice(start, start + tile)
        wanted = torch.log_softmax(teacher_states[rows] @ teacher_head.T, dim=-1)
        found = torch.log_softmax(states[rows] @ head.T, dim=-1)
        probability = wanted.exp()
        total += float(torch.linalg.vecdot(probability, wanted.sub_(found)).sum(dtype=torch.float64))
        if gradient is None:
            continue
        found.exp_().sub_(probability).div_(positions)
        torch.mm(found, head, out=gradient[rows])
        if head_gradient is not None:
            head_gradient.addmm_(found.T, states[rows])
    return total / positions, gradient


class Adam:
    """Adam (Kingma & Ba 2014, arXiv 1412.6980) on all groups of a model, in steps relative to a parameter's size.

    It works on a group's scale s and its middle value c = m + 7.5 s, whose gradients are nearly uncorrelated, where
    those of s and m are not. One step moves s by about `rate` * s and c by about `rate` * 7.5 s. A group of one value,
    whose scale is 0, stays as it is.
    """

    def __init__(self, scales: torch.Tensor, minima: torch.Tensor) -> None:
        self.scales, self.minima, self.sizes = scales, minima, scales.clone()
        self.moments = torch.zeros(2, 2, *scales.shape, device=scales.device)  # of s and of c: first, second
        self.done = 0

    def step(self, scale_gradients: torch.Tensor, minimum_gradients: torch.Tensor, rate: float) -> None:
        self.done += 1
        # dL/ds with c held: m = c - 7.5 s
        middle = self._move(1, minimum_gradients, MIDDLE * rate)
        scale = self._move(0, scale_gradients - MIDDLE * minimum_gradients, rate)
        self.scales.add_(scale).clamp_(min=0)
        self.minima.add_(middle - MIDDLE * scale)

    def _move(self, which: int, gradient: torch.Tensor, rate: float) -> torch.Tensor:
        first, second = self.moments[which]
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square(), 1 - BETAS[1])
        mean = first / (1 - BETAS[0] ** self.done)
        square = second / (1 - BETAS[1] ** self.done)
        return mean.div_(square.sqrt_().add_(EPSILON)).mul_(self.sizes).mul_(-rate)


def rate_share(step: int, steps: int) -> float:
    """Share of the full rate at a step, counted from 0: linear warm-up over the first sixteenth of the steps, then half
    a cosine down to a twentieth."""
    warm_up = max(1, steps // WARM_UP)
    if step < warm_up:
        return (step + 1) / warm_up
    return LEAST_SHARE + (1 - LEAST_SHARE) * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2
