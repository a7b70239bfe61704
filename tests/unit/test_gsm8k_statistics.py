import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom, norm

from yardstick.gsm8k.answers import CATEGORIES, CORRECT, NO_ANSWER, TRUNCATED, WRONG
from yardstick.gsm8k.generation import NOT_ASKED
from yardstick.gsm8k.statistics import accuracy, compare_runs, flip_interval, is_truncated


def runs(same=0, lost=0, gained=0, both_wrong=0):
    """Two runs with so many flips."""
    reference = [CORRECT] * (same + lost) + [WRONG] * (gained + both_wrong)
    candidate = [CORRECT] * same + [WRONG] * lost + [CORRECT] * gained + [WRONG] * both_wrong
    return reference, candidate


def test_accuracy_counts_truncated_as_asked_and_not_asked_as_neither():
    categories = [CORRECT] * 7 + [WRONG] * 8 + [NO_ANSWER] * 2 + [TRUNCATED] * 3 + [NOT_ASKED] * 5
    result = accuracy(categories)
    assert result["counts"] == {CORRECT: 7, WRONG: 8, NO_ANSWER: 2, TRUNCATED: 3, NOT_ASKED: 5}
    assert (result["problems"], result["asked"], result["accuracy"]) == (25, 20, 0.35)
    z, p, n = norm.ppf(0.975), 0.35, 20  # Wilson 1927
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    centre = p + z * z / (2 * n)
    expected = [(centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)]
    assert result["interval"] == pytest.approx(expected, rel=1e-9)
    assert expected == pytest.approx([0.1812, 0.5671], abs=1e-4)


@pytest.mark.parametrize("categories", [[], [NOT_ASKED] * 3])
def test_accuracy_of_nothing_is_none(categories):
    result = accuracy(categories)
    assert (result["asked"], result["accuracy"], result["interval"]) == (0, None, None)


def test_flips_and_their_truncations_by_hand():
    reference = [CORRECT, CORRECT, CORRECT, CORRECT, TRUNCATED, NO_ANSWER, WRONG, NOT_ASKED, CORRECT, TRUNCATED]
    candidate = [CORRECT, TRUNCATED, WRONG, NO_ANSWER, CORRECT, CORRECT, TRUNCATED, CORRECT, NOT_ASKED, TRUNCATED]
    result = compare_runs(reference, candidate, 0.02, 0)
    assert (result["pairs"], result["lost"], result["gained"]) == (8, 3, 2)
    assert (result["lost_truncated"], result["gained_truncated"]) == (1, 1)
    assert result["difference"] == -1 / 8
    assert result["p"] == 1.0  # 3 of 5: every split is at least as likely as far


def test_mcnemar_by_hand():
    result = compare_runs(*runs(same=50, lost=10, gained=2, both_wrong=38), 0.02, 0)
    assert result["p"] == pytest.approx(2 * (1 + 12 + 66) / 2**12, rel=1e-12)  # P(at most 2 of 12), twice
    other_way = compare_runs(*reversed(runs(same=50, lost=10, gained=2, both_wrong=38)), 0.02, 0)
    assert other_way["p"] == result["p"] and other_way["difference"] == -result["difference"] == 0.08


def test_bootstrap_agrees_with_resampling_of_problems():
    reference, candidate = runs(same=130, lost=31, gained=12, both_wrong=77)
    result = compare_runs(reference, candidate, 0.02, 5)
    difference = np.array([(b == CORRECT) - (a == CORRECT) for a, b in zip(reference, candidate, strict=True)], float)
    picks = np.random.default_rng(0).integers(0, 250, size=(20_000, 250))
    means = difference[picks].mean(axis=1)
    assert result["difference"] == difference.mean() == -19 / 250
    assert result["interval"] == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.0045)  # a step is 0.004
    assert result["equivalence_interval"] == pytest.approx(np.percentile(means, [5, 95]), abs=0.0045)
    assert compare_runs(reference, candidate, 0.02, 5) == result
    assert len({str(compare_runs(reference, candidate, 0.02, seed)["interval"]) for seed in range(8)}) > 1


def test_flip_interval_is_built_of_exact_limits():
    pairs, lost, gained = 250, 31, 12
    low = {k: beta.ppf(0.05, k, pairs - k + 1) for k in (lost, gained)}  # Clopper and Pearson by the beta distribution
    high = {k: beta.ppf(0.95, k + 1, pairs - k) for k in (lost, gained)}
    lose, gain = lost / pairs, gained / pairs
    expected = [
        gain - lose - math.sqrt((gain - low[gained]) ** 2 + (high[lost] - lose) ** 2),
        gain - lose + math.sqrt((high[gained] - gain) ** 2 + (lose - low[lost]) ** 2),
    ]
    assert flip_interval(pairs, lost, gained, 0.90) == pytest.approx(expected, rel=1e-6)
    bound = 1 - 0.05 ** (1 / 60)
    assert flip_interval(60, 0, 0, 0.90) == pytest.approx([-bound, bound], rel=1e-6)


def test_many_flips_make_both_intervals_alike():
    result = compare_runs(*runs(same=5000, lost=400, gained=380, both_wrong=4220), 0.02, 0)
    assert result["flip_interval"] == pytest.approx(result["equivalence_interval"], abs=6e-4)
    assert result["verdict"] == "equivalent"


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [(0, "undecided"), (1, "undecided"), (5, "undecided"), (148, "undecided"), (149, "equivalent")],
)
def test_a_run_without_flips_is_equivalent_only_if_there_were_enough_problems(pairs, verdict):
    """1 - 0.05^(1/148) = 0.02004 and 1 - 0.05^(1/149) = 0.01990."""
    result = compare_runs(*runs(same=pairs), 0.02, 0)
    assert result["verdict"] == verdict
    assert (result["lost"], result["gained"]) == (0, 0)
    if pairs:
        assert result["p"] == 1.0 and result["difference"] == 0.0
    if pairs > 1:
        assert result["interval"] == [0.0, 0.0]


@pytest.mark.parametrize("pairs", [60, 149, 150, 237, 400])
def test_a_loss_of_the_margin_is_called_equivalent_in_at_most_5_percent(pairs):
    """Exact: over all counts of losses that a true loss of 2 points gives."""
    margin, chance = 0.02, 0.0
    for lost in range(pairs + 1):
        if compare_runs(*runs(same=pairs - lost, lost=lost), margin, 0)["verdict"] != "equivalent":
            break
        chance += binom.pmf(lost, pairs, margin)
    assert chance <= 0.05
    assert (chance > 0) == (pairs >= 149)


def test_verdicts():
    def verdict(**flips):
        return compare_runs(*runs(**flips), 0.02, 0)["verdict"]

    assert verdict(same=150, lost=20, gained=4, both_wrong=26) == "worse"
    assert verdict(same=150, lost=4, gained=20, both_wrong=26) == "better"
    assert verdict(same=150, lost=12, gained=10, both_wrong=28) == "undecided"
    # the bootstrap alone would call this worse; four losses and no gain have p = 0.125
    result = compare_runs(*runs(same=150, lost=4, both_wrong=46), 0.02, 0)
    assert result["interval"][1] < 0 and result["p"] == 0.125 and result["verdict"] == "undecided"
    assert verdict(lost=5) == "undecided"
    assert verdict(same=150, lost=6, both_wrong=44) == "worse"
    # surely there and surely small: the margin decides
    result = compare_runs(*runs(same=5000, lost=60, gained=20, both_wrong=4920), 0.02, 0)
    assert result["interval"][1] < 0 and result["p"] < 1e-4 and result["verdict"] == "equivalent"


def test_a_pair_or_none_gives_no_interval():
    none = compare_runs([CORRECT, NOT_ASKED], [NOT_ASKED, CORRECT], 0.02, 0)
    assert (none["pairs"], none["p"], none["difference"], none["interval"]) == (0, None, None, None)
    one = compare_runs([CORRECT], [TRUNCATED], 0.02, 0)
    assert (one["pairs"], one["p"], one["difference"], one["interval"]) == (1, 1.0, -1.0, None)
    assert (one["flip_interval"], one["verdict"]) == (None, "undecided")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CATEGORIES), st.sampled_from(CATEGORIES)), max_size=12))
def test_any_small_pair_of_runs_is_compared_without_nan(pairs):
    reference, candidate = [a for a, _ in pairs], [b for _, b in pairs]
    result = compare_runs(reference, candidate, 0.02, 0)
    numbers = [result["p"], result["difference"]]
    for key in ("interval", "equivalence_interval", "flip_interval"):
        numbers += result[key] or []
    assert all(number is None or math.isfinite(number) for number in numbers)
    assert result["verdict"] != "equivalent"  # twelve problems never show 2 points
    same = compare_runs(reference, reference, 0.02, 0)
    assert (same["lost"], same["gained"]) == (0, 0)
    assert same["pairs"] == 0 or (same["p"], same["difference"]) == (1.0, 0.0)


def test_runs_that_cannot_be_paired_are_refused():
    with pytest.raises(ValueError, match="runs of 2 and of 1 problems"):
        compare_runs([CORRECT, WRONG], [CORRECT], 0.02, 0)
    with pytest.raises(ValueError, match="category 'right' is none of correct, "):
        accuracy(["right"])


def test_more_than_2_percent_truncated_are_many():
    assert not is_truncated(accuracy([CORRECT] * 98 + [TRUNCATED] * 2 + [NOT_ASKED] * 9)["counts"])
    assert is_truncated(accuracy([CORRECT] * 97 + [TRUNCATED] * 3 + [NOT_ASKED] * 90)["counts"])
    assert not is_truncated(accuracy([NOT_ASKED] * 4)["counts"]) and not is_truncated({})
