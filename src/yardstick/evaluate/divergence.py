"""Per-position divergence from final hidden states and heads, without ever holding the logits or a whole head.

Both heads are walked once, in tiles of the vocabulary; inside a tile, blocks of positions. For each position a running
maximum m and sums rescaled to it are kept (as in online softmax):

    KL(p || q) = sum_v p_v (x_v - y_v - c) - (logsumexp x - logsumexp y - c),  p = softmax(x),

where x and y are the two logit rows and c is the difference of their maxima: the difference of two near-equal logits
is exact in fp32, and with c taken off a shift of all logits of one model costs no precision.

Logits are fp32 whatever the body computed in, sums are fp64. Equal inputs give exactly 0. A position where both
logits are minus infinity adds nothing; p > 0 where q = 0 makes the KL infinite, which `find_fault` reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

VOCAB_TILE = 2048
POSITION_TILE = 1024
RUN = 64
METRIC_VERSION = 1


@dataclass
class Divergence:
    """One value per position; natural logarithms, so KL and NLL are in nats."""

    kl: torch.Tensor
    reference_nll: torch.Tensor
    nll: torch.Tensor
    reference_top1: torch.Tensor
    top1: torch.Tensor
    reference_top1_probability: torch.Tensor
    label_delta_p: torch.Tensor


class _Softmax:
    """Running maximum, its index, the sum of exponentials and the label's logit for a block of positions."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self.maximum = torch.full((positions,), -torch.inf, device=device)
        self.argmax = torch.zeros(positions, dtype=torch.int64, device=device)
        self.total = torch.zeros(positions, dtype=torch.float64, device=device)
        self.label_logit = torch.full((positions,), torch.nan, device=device)

    def enter(self, logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
        """Take in the maximum and the labels of a tile; returns the factor that old sums are rescaled by."""
        tile_maximum = logits.amax(dim=1)
        larger = tile_maximum > self.maximum
        new_maximum = torch.where(larger, tile_maximum, self.maximum)
        moved = torch.nonzero(larger).squeeze(1)  # few rows after the first tiles, and argmax is slow
        self.argmax[moved] = logits[moved].argmax(dim=1) + first
        rescale = torch.where(larger, (self.maximum.double() - new_maximum.double()).exp(), 1.0)
        self.maximum = new_maximum
        inside = torch.nonzero((labels >= first) & (labels < first + logits.shape[1])).squeeze(1)
        self.label_logit[inside] = logits[inside, labels[inside] - first]
        return rescale

    @property
    def offset(self) -> torch.Tensor:
        """The maximum, or 0 for a row that is all minus infinity so far."""
        return torch.where(self.maximum == -torch.inf, 0.0, self.maximum)

    def logsumexp(self) -> torch.Tensor:
        return self.maximum.double() + self.total.log()


def tile_count(vocabulary: int) -> int:
    """How often `compare` passes over the positions."""
    return -(-vocabulary // VOCAB_TILE)


def compare(
    reference_states: torch.Tensor,
    reference_head,
    states: torch.Tensor,
    head,
    labels: torch.Tensor,
    vocabulary: int | None = None,
    on_positions=lambda positions: None,
) -> Divergence:
    """Compare two models at every position.

    Args:
        reference_states, states: final-normed hidden states [positions, hidden].
        reference_head, head: output heads [vocab, hidden], as tensors or read by rows.
        labels: next token ids [positions].
        vocabulary: real rows of the heads, where a checkpoint pads them; all of them by default.
        on_positions: told the positions done, once for each tile of the vocabulary.
    """
    return compare_many(reference_states, reference_head, [states], head, labels, vocabulary, on_positions)[0]


def compare_many(
    reference_states: torch.Tensor,
    reference_head,
    candidates: Sequence[torch.Tensor],
    head,
    labels: torch.Tensor,
    vocabulary: int | None = None,
    on_positions=lambda positions: None,
) -> list[Divergence]:
    """As `compare`, for the states of several models that share one head: the reference's side is worked out once.

    `on_positions` is told the positions of all candidates.
    """
    device = candidates[0].device
    reference_states, labels = reference_states.to(device), labels.to(device).long()
    blocks = [slice(start, start + POSITION_TILE) for start in range(0, len(labels), POSITION_TILE)]
    together = max(1, POSITION_TILE // len(labels))  # short candidates share a block
    groups = [candidates[start : start + together] for start in range(0, len(candidates), together)]
    references = [_Reference(labels[rows]) for rows in blocks]
    running = [[_Comparison(reference, len(group)) for reference in references] for group in groups]
    vocabulary = len(head) if vocabulary is None else vocabulary
    for first in range(0, vocabulary, VOCAB_TILE):
        tile = slice(first, min(first + VOCAB_TILE, vocabulary))
        reference_tile, own_tile = reference_head[tile].to(device).float(), head[tile].to(device).float()
        for block, rows in enumerate(blocks):
            x = reference_states[rows].float() @ reference_tile.T
            references[block].add(x, first)
            for group, comparisons in zip(groups, running, strict=True):
                states = torch.cat([states[rows] for states in group]) if len(group) > 1 else group[0][rows]
                y = states.float() @ own_tile.T
                comparisons[block].add(x, y, first)
                on_positions(len(y))
    found = []
    for group, comparisons in zip(groups, running, strict=True):
        parts = [comparison.results() for comparison in comparisons]
        for index in range(len(group)):
            values = ([getattr(part[index], name) for part in parts] for name in Divergence.__dataclass_fields__)
            found.append(Divergence(*map(torch.cat, values)))
    return found


class _Reference:
    """The reference's side of a block of positions, which all candidates of the block are held against."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels, self.softmax = labels, _Softmax(len(labels), labels.device)
        self.old_total, self.rescale, self.p = self.softmax.total, None, None

    def add(self, x: torch.Tensor, first: int) -> None:
        """Take in the logits [positions, tile] of the vocabulary from `first` on."""
        self.old_total, self.rescale = self.softmax.total, self.softmax.enter(x, self.labels, first)
        self.p = (x - self.softmax.offset[:, None]).exp_()
        self.softmax.total = self.old_total * self.rescale + _row_sums(self.p)


class _Comparison:
    """Running sums of a block of positions for `count` candidates, one after the other."""

    def __init__(self, reference: _Reference, count: int) -> None:
        self.reference, self.count, self.labels = reference, count, reference.labels.repeat(count)
        positions, device = len(self.labels), self.labels.device
        self.candidate = _Softmax(positions, device)
        self.gap = torch.zeros(positions, device=device)  # c, the difference of the maxima so far
        # sum of exp(x - max x) (x - y - c)
        self.cross = torch.zeros(positions, dtype=torch.float64, device=device)

    def add(self, x: torch.Tensor, y: torch.Tensor, first: int) -> None:
        """Take in the logits x [positions, tile] of the reference, which has them already, and y [count * positions,
        tile]; y is used up."""
        reference, candidate, old_gap, count = self.reference, self.candidate, self.gap, self.count
        candidate.total *= candidate.enter(y, self.labels, first)
        self.gap = gap = reference.softmax.offset.repeat(count) - candidate.offset
        # old terms, on the new gap
        moved = reference.old_total.repeat(count) * (old_gap.double() - gap.double())
        cross = (self.cross + moved) * reference.rescale.repeat(count)
        apart = y.unflatten(0, (count, -1))
        difference = (x - apart).sub_(gap.view(count, -1, 1))
        candidate.total += _row_sums(y.sub_(candidate.offset[:, None]).exp_())
        if not bool(difference.sum().isfinite()):
            difference.masked_fill_(reference.p == 0, 0.0)  # minus infinity in both: 0 * (inf - inf) is 0 here
        self.cross = cross + _row_sums(difference.mul_(reference.p).flatten(0, 1))

    def results(self) -> list[Divergence]:
        """One for each candidate."""
        reference, candidate, count = self.reference.softmax, self.candidate, self.count
        x_lse, y_lse = reference.logsumexp(), candidate.logsumexp()
        label_x = (reference.label_logit.double() - x_lse).repeat(count)
        label_y = candidate.label_logit.double() - y_lse
        kl = self.cross / reference.total.repeat(count) - (x_lse.repeat(count) - y_lse - self.gap.double())
        both = {
            "kl": kl,
            "reference_nll": -label_x,
            "nll": -label_y,
            "reference_top1": reference.argmax.repeat(count),
            "top1": candidate.argmax,
            "reference_top1_probability": (reference.maximum.double() - x_lse).exp().repeat(count),
            "label_delta_p": label_y.exp() - label_x.exp(),
        }
        apart = {name: values.chunk(count) for name, values in both.items()}
        return [Divergence(**{name: values[index] for name, values in apart.items()}) for index in range(count)]


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """fp64 sums of fp32 rows: runs of 64 in fp32 (an error below 1e-7 of their size), then fp64."""
    if values.shape[1] % RUN:
        return values.sum(dim=1, dtype=torch.float64)
    return values.unflatten(1, (-1, RUN)).sum(dim=2).sum(dim=1, dtype=torch.float64)


KL_TOLERANCE = 1e-6


def find_fault(divergence: Divergence) -> tuple[int, str] | None:
    """First position whose KL or NLL cannot be true, with the reason: NaN, infinite, or a KL below -1e-6."""
    kl = divergence.kl
    faults = {
        "KL is NaN": kl.isnan(),
        "KL is infinite": kl.isinf(),
        f"KL is below -{KL_TOLERANCE:g}": kl < -KL_TOLERANCE,
        "NLL is not finite": ~(divergence.nll.isfinite() & divergence.reference_nll.isfinite()),
    }
    found = [(int(torch.nonzero(bad)[0]), reason) for reason, bad in faults.items() if bool(bad.any())]
    return min(found) if found else None
