import math

import pytest
import torch

from yardstick.evaluate import divergence
from yardstick.evaluate.divergence import compare, compare_many, find_fault

INF = math.inf


def from_logits(reference, candidate, labels=None):
    """Compare two logit tables by using them as hidden states of an identity head."""
    reference, candidate = torch.tensor(reference), torch.tensor(candidate)
    head = torch.eye(reference.shape[1])
    labels = torch.zeros(len(reference), dtype=torch.int64) if labels is None else torch.tensor(labels)
    return compare(reference, head, candidate, head, labels)


def expected_kl(x, y):
    p, q = torch.log_softmax(x.double(), -1), torch.log_softmax(y.double(), -1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("vocabulary", [5, 2047, 2048, 2049, 5000])
def test_agrees_with_log_softmax_in_fp64_at_the_edges_of_tiles(vocabulary):
    states, other = torch.randn(1030, 12), torch.randn(1030, 12)
    head, other_head = torch.randn(vocabulary, 12), torch.randn(vocabulary, 12)
    labels = torch.randint(0, vocabulary, (1030,))
    labels[:2] = torch.tensor([0, vocabulary - 1])
    result = compare(states, head, other, other_head, labels)
    x, y = states @ head.T, other @ other_head.T
    torch.testing.assert_close(result.kl, expected_kl(x, y), rtol=1e-5, atol=1e-6)
    picked = torch.arange(1030)
    torch.testing.assert_close(
        result.reference_nll, -torch.log_softmax(x.double(), -1)[picked, labels], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(result.nll, -torch.log_softmax(y.double(), -1)[picked, labels], rtol=1e-5, atol=1e-5)
    assert (result.reference_top1 == x.argmax(-1)).float().mean() > 0.999
    assert (result.top1 == y.argmax(-1)).float().mean() > 0.999
    torch.testing.assert_close(
        result.reference_top1_probability, torch.softmax(x.double(), -1).amax(-1), rtol=1e-5, atol=1e-6
    )
    p, q = torch.softmax(x.double(), -1)[picked, labels], torch.softmax(y.double(), -1)[picked, labels]
    torch.testing.assert_close(result.label_delta_p, q - p, rtol=1e-4, atol=1e-6)


def test_equal_models_have_a_divergence_of_exactly_zero():
    states, head = torch.randn(300, 16), torch.randn(3000, 16)
    result = compare(states, head, states.clone(), head.clone(), torch.zeros(300, dtype=torch.int64))
    assert result.kl.abs().max() == 0
    assert torch.equal(result.top1, result.reference_top1)
    assert result.label_delta_p.abs().max() == 0


def test_a_small_divergence_is_not_lost():
    assert float(from_logits([[10.0, 9.99]], [[10.0, 10.01]]).kl) == pytest.approx(5.0e-5, rel=0.01)


def test_a_shift_of_all_logits_changes_nothing():
    result = from_logits([[1.0, 2.0, 3.0]], [[101.0, 102.0, 103.0]])
    assert float(result.kl) == pytest.approx(0.0, abs=1e-9)


def test_tokens_masked_in_both_add_nothing(monkeypatch):
    states = torch.tensor([[0.0, 0.0, -INF]])
    monkeypatch.setattr(divergence, "VOCAB_TILE", 1)  # also where a whole tile is masked
    # an identity head would turn -inf * 0 into NaN: give the logits through a stand-in product
    result = masked(states, states)
    assert float(result.kl) == 0.0


def masked(x, y):
    """Compare logits that hold minus infinity, whose product with a head cannot be formed."""

    class Logits:
        def __init__(self, table):
            self.table = table

        def __len__(self):
            return len(self.table)

        @property
        def device(self):
            return self.table.device

        def float(self):
            return self

        def to(self, *_):
            return self

        def __getitem__(self, rows):
            return Logits(self.table[rows])

        def __matmul__(self, tile):
            return self.table[:, tile[0].long()].clone()

    columns = torch.arange(x.shape[1]).float()[:, None]
    return compare(Logits(x), columns, Logits(y), columns, torch.zeros(len(x), dtype=torch.int64))


def test_a_token_that_the_candidate_rules_out_is_infinite_and_reported():
    result = masked(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, -INF]]))
    assert float(result.kl[0]) == 0.0 and math.isinf(float(result.kl[1]))
    assert find_fault(result) == (1, "KL is infinite")


def test_padding_rows_are_cut_off_before_the_softmax():
    reference, candidate = torch.tensor([[2.0, 1.0, -9.0]]), torch.tensor([[2.0, 1.0, 5.0]])
    head = torch.eye(3)
    label = torch.zeros(1, dtype=torch.int64)
    assert float(compare(reference, head, candidate, head, label).kl) == pytest.approx(2.75, abs=0.01)
    assert float(compare(reference, head[:2], candidate, head[:2], label).kl) == 0.0


def test_faults_name_the_first_position():
    result = compare(torch.randn(9, 4), torch.eye(4), torch.randn(9, 4), torch.eye(4), torch.zeros(9))
    assert find_fault(result) is None
    result.kl[5] = -2e-6
    assert find_fault(result) == (5, "KL is below -1e-06")
    result.kl[3] = math.nan
    assert find_fault(result) == (3, "KL is NaN")


def test_a_nan_state_is_a_fault_not_an_average():
    states = torch.randn(6, 4)
    broken = states.clone()
    broken[2, 1] = math.nan
    result = compare(states, torch.eye(4), broken, torch.eye(4), torch.zeros(6))
    assert find_fault(result)[0] == 2


def test_near_equal_models_are_resolved_far_below_the_tolerance():
    """Logits of size 30 come in fp32 steps of 2e-6: single positions must be right to 2e-7, means to 2e-8."""
    states = torch.randn(200, 16)
    head = torch.randn(3000, 16) * 8
    near = states + 1e-5 * torch.randn(200, 16)
    result = compare(states, head, near, head, torch.zeros(200))
    # the logits themselves are fp32 products; take them as they are and compare in fp64
    expected = expected_kl(states @ head.T, near @ head.T)
    assert float((result.kl - expected).abs().max()) < 2e-7
    assert abs(float((result.kl - expected).mean())) < 2e-8


@pytest.mark.parametrize("positions", [70, 400])
def test_many_candidates_are_compared_as_each_alone(positions, monkeypatch):
    monkeypatch.setattr(divergence, "POSITION_TILE", 256)  # three candidates share a block, or one takes two
    head, own_head = torch.randn(2500, 24), torch.randn(2500, 24)
    reference, labels = 2 * torch.randn(positions, 24), torch.randint(0, 2400, (positions,))
    candidates = [reference + scale * torch.randn(positions, 24) for scale in (0.01, 0.1, 1, 0.5, 0.02)]
    found = compare_many(reference, head, candidates, own_head, labels, 2400)
    for states, many in zip(candidates, found, strict=True):
        alone = compare(reference, head, states, own_head, labels, 2400)
        expected = expected_kl(reference @ head[:2400].T, states @ own_head[:2400].T)
        torch.testing.assert_close(many.kl, expected, rtol=1e-4, atol=1e-4)
        for name in alone.__dataclass_fields__:
            torch.testing.assert_close(getattr(many, name), getattr(alone, name), rtol=1e-5, atol=1e-6)
