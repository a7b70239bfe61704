"""Why a tensor differs from the original: quantized, permuted, smoothed, or unrelated.

A relative error near 1 says that two matrices have nothing to do with each other, whatever the bits: two unrelated
ones of the same norm give sqrt(2), a zero one gives 1. Quantizing gives far less (4 bits: about 0.1). So a large error
on some tensors is a difference of layout, and this module looks for the layout.
"""

from dataclasses import dataclass

import torch

SAME, PLAIN, UNRELATED = 0.0, 2.0**-8, 0.5  # relative errors: equal, rounding of a 16-bit type, nothing in common
ROWS_AT_ONCE = 2048
STRETCH = 16  # columns of one group, whatever its size
EXPLAINED = 0.5  # an explanation leaves less than this share of an error
FITTED = 8  # rows or columns from which a least-squares factor is taken for one
SIDES = ("rows", "columns")


@dataclass(frozen=True)
class Finding:
    """What was found for one tensor: relative error as it lies, a verdict, and what explains it."""

    error: float
    verdict: str
    detail: str = ""


def relative_error(candidate: torch.Tensor, base: torch.Tensor) -> float:
    """‖Ŵ − W‖ / ‖W‖ in fp64; 0 where both are zero."""
    difference = (candidate.float() - base.float()).norm(dtype=torch.float64)
    size = base.float().norm(dtype=torch.float64)
    return float(difference / size) if size > 0 else float(difference > 0)


def judge(error: float) -> str:
    """`same`, `rounded` (to a 16-bit type), `quantized` or `unrelated`."""
    if error == SAME:
        return "same"
    if error <= PLAIN:
        return "rounded"
    return "quantized" if error < UNRELATED else "unrelated"


def inspect_tensor(candidate: torch.Tensor, base: torch.Tensor, factors: torch.Tensor | None = None) -> Finding:
    """Compare a tensor with the original's; where they seem unrelated, look for a permutation of rows or columns.

    `factors` are per-channel factors that smoothing would have put on the input columns; a matrix that only then
    looks like the original is called smoothed.
    """
    if candidate.shape != base.shape:
        return Finding(float("nan"), "misshapen", f"{list(candidate.shape)} against {list(base.shape)}")
    candidate, base = candidate.float(), base.float()
    error = relative_error(candidate, base)
    if factors is not None and base.ndim == 2 and len(factors) == base.shape[1]:
        undone = relative_error(candidate / factors, base)
        if undone < EXPLAINED * error:
            low, high = float(factors.min()), float(factors.max())
            detail = f"error {undone:.4f} with factors {low:.3g} to {high:.3g} of the norm undone"
            return Finding(error, "smoothed", detail)
    scaled = find_scales(candidate, base, error)
    if scaled:
        return Finding(error, "scaled", scaled)
    shifted = find_shift(candidate, base, error)
    if shifted:
        return Finding(error, "shifted", shifted)
    verdict = judge(error)
    if verdict != "unrelated" or base.ndim > 2:
        return Finding(error, verdict)
    for axis in range(base.ndim):
        order = find_permutation(candidate, base, axis)
        if order is None:
            continue
        after = relative_error(candidate, base.index_select(axis, order))
        if after < UNRELATED:
            return Finding(error, "permuted", f"{SIDES[axis]}: {describe(order)}; error {after:.4f} with it undone")
    if base.ndim == 2 and base.shape[0] == base.shape[1]:
        after = relative_error(candidate.T, base)
        if after < UNRELATED:
            return Finding(error, "transposed", f"error {after:.4f} with it undone")
    return Finding(error, verdict)


def find_scales(candidate: torch.Tensor, base: torch.Tensor, error: float) -> str | None:
    """Factors of columns, of rows, or of both that explain most of an error, in words; None if there are none.

    Smoothing leaves them between matrices that no norm joins, such as the rows of up_proj and the columns of down_proj.
    A matrix needs enough rows that a least-squares fit says something.
    """
    if base.ndim != 2 or min(base.shape) < FITTED or error <= PLAIN:
        return None
    best, found = EXPLAINED * error, None
    for axes in ((1,), (0,), (1, 0, 1, 0)):
        undone, total = candidate, {axis: torch.ones(base.shape[axis]) for axis in axes}
        for axis in axes:
            factors = channel_factors(undone, base, axis)
            if factors is None:
                break
            undone = undone / factors.unsqueeze(1 - axis)
            total[axis] = total[axis] * factors
        else:
            after = relative_error(undone, base)
            if after < best:
                best = 0.9 * after  # two sides have to do better than one
                parts = [f"{float(total[a].min()):.3g} to {float(total[a].max()):.3g} of its {SIDES[a]}" for a in total]
                found = f"error {after:.4f} with factors {' and '.join(parts)} undone"
    return found


def channel_factors(candidate: torch.Tensor, base: torch.Tensor, axis: int) -> torch.Tensor | None:
    """Least-squares factors sum(w b) / sum(b b) of the original's rows (axis 0) or columns (axis 1); None where one of
    them is not positive."""
    factors = (candidate * base).sum(1 - axis) / base.square().sum(1 - axis).clamp_min(1e-30)
    return factors if bool((factors > 0).all()) else None


def find_shift(candidate: torch.Tensor, base: torch.Tensor, error: float) -> str | None:
    """A constant that all weights of a stretch of a row are beside the original's, in words; None if there is none.

    Zero points that are one off do that: each group of columns is off by its scale.
    """
    if base.ndim != 2 or base.shape[1] < STRETCH or error <= PLAIN:
        return None
    width = base.shape[1] // STRETCH * STRETCH
    difference = (candidate - base)[:, :width].unflatten(1, (-1, STRETCH))
    rest = difference - difference.mean(2, keepdim=True)
    after = float(rest.norm(dtype=torch.float64) / base[:, :width].norm(dtype=torch.float64).clamp_min(1e-30))
    if after >= EXPLAINED * error:
        return None
    return f"error {after:.4f} without the mean of every {STRETCH} columns; are zero points one off?"


def find_permutation(candidate: torch.Tensor, base: torch.Tensor, axis: int) -> torch.Tensor | None:
    """`order` such that row i of the candidate is row order[i] of the original, by the best cosine; None if it is none.

    `axis` 1 matches columns. Of a vector, values are matched by their rank.
    """
    if base.ndim == 1:
        order = torch.empty(len(base), dtype=torch.int64)
        order[torch.argsort(candidate, stable=True)] = torch.argsort(base, stable=True)
        return order
    left, right = (x if axis == 0 else x.T for x in (candidate, base))
    left, right = (x / x.norm(dim=1, keepdim=True).clamp_min(1e-30) for x in (left, right))
    order = torch.cat([(left[i : i + ROWS_AT_ONCE] @ right.T).argmax(dim=1) for i in range(0, len(left), ROWS_AT_ONCE)])
    return order if len(torch.unique(order)) == len(order) else None


def describe(order: torch.Tensor) -> str:
    """A permutation in few words: blocks that moved as they are, or the same order inside every block."""
    divisors = [size for size in range(2, len(order) // 2 + 1) if len(order) % size == 0]
    for size in reversed(divisors):
        blocks = order.view(-1, size)
        if bool((blocks == blocks[:, :1] + torch.arange(size)).all()):
            return f"blocks of {size} in the order {shown(blocks[:, 0] // size)}"
    for size in divisors:  # as the rotary permutation of a head
        inside = order.view(-1, size) - torch.arange(0, len(order), size)[:, None]
        if bool((inside == inside[0]).all()):
            return f"in each block of {size} the order {shown(order[:size])}"
    return f"the order {shown(order)}"


def shown(order: torch.Tensor, most: int = 16) -> str:
    values = ", ".join(str(int(i)) for i in order[:most])
    return f"[{values}{', ...' if len(order) > most else ''}]"


def gain(weights: torch.Tensor, zero_centred: bool) -> torch.Tensor:
    """What a norm multiplies by, fp32: w, or 1 + w where the family's norm is centred on zero."""
    return 1.0 + weights.float() if zero_centred else weights.float()


def smoothing_factors(candidate_gain: torch.Tensor, base_gain: torch.Tensor, zero_centred: bool) -> torch.Tensor | None:
    """Per-channel factors s that smoothing moved from a norm (gain g / s) into the matrices after it (W s).

    A channel that is zero in both carries nothing and has the factor 1. None where the norm is unchanged, or where a
    channel is zero in only one of the two.
    """
    own, original = gain(candidate_gain, zero_centred), gain(base_gain, zero_centred)
    if own.shape != original.shape or torch.equal(own, original):
        return None
    silent = original == 0
    if not torch.equal(own == 0, silent):
        return None
    return torch.where(silent, 1.0, original / own)
