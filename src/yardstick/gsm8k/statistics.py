"""Accuracy of one run, and what changed between two runs of the same problems.

Runs are sequences of categories (`answers.CATEGORIES`) in the order of the problems. A problem that was not asked is
outside every count; a truncated answer is inside, as not correct.

Flips are few, and there a bootstrap alone says too much. A sample without flips has a bootstrap interval of no width,
of five pairs as of a thousand; and with four flips, all of them losses, the 95 % interval excludes 0 although such a
split has an exact p of 0.125. So each verdict needs a second, exact leg:

- "equivalent" (two one-sided tests at 5 %): the 90 % bootstrap interval of the difference and the 90 % interval from
  exact bounds of the two flip rates (`flip_interval`) both lie inside (-margin, margin). With no flips in n pairs the
  second is ±(1 - 0.05^(1/n)), so a margin of 2 points needs at least 149 pairs.
- "worse" and "better": the 95 % bootstrap interval lies below or above 0, and McNemar's exact p is below 0.05.
- "undecided": anything else.

Runs without a correct answer, or with more than 2 % truncated, are never called equivalent. Equivalence is asked
first: a difference that is surely there and surely inside the margin is "equivalent", with its interval and p beside
it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import binomtest

from yardstick.gsm8k.answers import CATEGORIES, CORRECT, NOT_ASKED, TRUNCATED

RESAMPLES = 10_000
LEVEL = 0.95  # of intervals
EQUIVALENCE_LEVEL = 0.90  # two one-sided tests at 5 %
SIGNIFICANT = 0.05
MANY_TRUNCATED = 0.02


def _require_known(categories: Sequence[str]) -> None:
    unknown = sorted(set(categories) - set(CATEGORIES))
    if unknown:
        raise ValueError(f"category {unknown[0]!r} is none of {', '.join(CATEGORIES)}")


def accuracy(categories: Sequence[str]) -> dict:
    """`problems`, `asked`, `counts` of each category, `accuracy` = correct / asked and its Wilson 95 % `interval`.

    The last two are None where nothing was asked.
    """
    _require_known(categories)
    found = Counter(categories)
    counts = {category: found[category] for category in CATEGORIES}
    asked = len(categories) - counts[NOT_ASKED]
    share, interval = None, None
    if asked:
        share = counts[CORRECT] / asked
        interval = _floats(binomtest(counts[CORRECT], asked).proportion_ci(LEVEL, method="wilson"))
    return {"problems": len(categories), "asked": asked, "counts": counts, "accuracy": share, "interval": interval}


def compare_runs(reference: Sequence[str], candidate: Sequence[str], margin: float, seed: int) -> dict:
    """What changed from `reference` to `candidate` on the problems that both were asked.

    Args:
        reference, candidate: categories of the same problems in the same order.
        margin: the largest difference of accuracy, as a share, that counts as none.
        seed: of the bootstrap (NumPy's PCG64).

    Returns:
        `pairs`; `lost` (correct in the reference only) and `gained` (correct in the candidate only); `lost_truncated`
        of the lost were cut off in the candidate, `gained_truncated` of the gained in the reference; `p` of McNemar's
        exact two-sided test, 1 without flips; `difference` of the accuracies, candidate minus reference, its 95 %
        paired bootstrap `interval`, its 90 % `equivalence_interval` by bootstrap and `flip_interval` by exact bounds;
        `margin`; `verdict`. Without pairs `p` and `difference` are None, with fewer than two the intervals are, and the
        verdict is "undecided".

    Raises:
        ValueError: the runs are of different length.
    """
    if len(reference) != len(candidate):
        raise ValueError(f"runs of {len(reference)} and of {len(candidate)} problems cannot be paired")
    _require_known([*reference, *candidate])
    both = [(a, b) for a, b in zip(reference, candidate, strict=True) if NOT_ASKED not in (a, b)]
    lost_to = [b for a, b in both if a == CORRECT and b != CORRECT]
    gained_from = [a for a, b in both if a != CORRECT and b == CORRECT]
    pairs, lost, gained = len(both), len(lost_to), len(gained_from)
    result = {
        "pairs": pairs,
        "lost": lost,
        "gained": gained,
        "lost_truncated": lost_to.count(TRUNCATED),
        "gained_truncated": gained_from.count(TRUNCATED),
        "p": mcnemar_p(lost, gained) if pairs else None,
        "difference": (gained - lost) / pairs if pairs else None,
        "interval": None,
        "equivalence_interval": None,
        "flip_interval": None,
        "margin": margin,
    }
    if pairs > 1:
        differences = _bootstrap(pairs, lost, gained, seed)
        result["interval"] = _percentile_interval(differences, LEVEL)
        result["equivalence_interval"] = _percentile_interval(differences, EQUIVALENCE_LEVEL)
        result["flip_interval"] = flip_interval(pairs, lost, gained, EQUIVALENCE_LEVEL)
    verdict = _verdict(result)
    if verdict == "equivalent" and not _can_be_equivalent(reference, candidate):
        verdict = "undecided"
    return result | {"verdict": verdict}


def mcnemar_p(lost: int, gained: int) -> float:
    """McNemar's exact two-sided p: flips go either way with probability 1/2. 1 without flips."""
    return float(binomtest(lost, lost + gained, 0.5).pvalue) if lost + gained else 1.0


def flip_interval(pairs: int, lost: int, gained: int, level: float) -> list[float]:
    """Interval of the difference gained - lost as a share, from exact bounds of the two rates.

    Clopper and Pearson's limits of each rate, put together by the method of variance estimates recovery (Zou and
    Donner, Statistics in Medicine 27, 2008): with g in [g-, g+] and l in [l-, l+] the lower limit is
    g - l - sqrt((g - g-)^2 + (l+ - l)^2), the upper one g - l + sqrt((g+ - g)^2 + (l - l-)^2). Without flips both
    reduce to the exact bound of a rate that was never seen, ±(1 - a^(1/n)) with a = (1 - level) / 2.
    """
    l, g = lost / pairs, gained / pairs  # noqa: E741 (the formula's letters)
    l_low, l_high = binomtest(lost, pairs).proportion_ci(level, method="exact")
    g_low, g_high = binomtest(gained, pairs).proportion_ci(level, method="exact")
    return _floats((g - l - math.hypot(g - g_low, l_high - l), g - l + math.hypot(g_high - g, l - l_low)))


def _bootstrap(pairs: int, lost: int, gained: int, seed: int) -> np.ndarray:
    """Differences of RESAMPLES resamples of the pairs. Each pair is -1, 0 or +1, so their counts are multinomial."""
    shares = [lost / pairs, gained / pairs, (pairs - lost - gained) / pairs]
    counts = np.random.Generator(np.random.PCG64(seed)).multinomial(pairs, shares, size=RESAMPLES)
    return (counts[:, 1] - counts[:, 0]) / pairs


def _percentile_interval(values: np.ndarray, level: float) -> list[float]:
    return _floats(np.percentile(values, [50 * (1 - level), 50 * (1 + level)]))


def _can_be_equivalent(*runs: Sequence[str]) -> bool:
    """Two runs that answer nothing right, or that are cut off, are alike without having shown anything."""
    return any(CORRECT in run for run in runs) and not any(is_truncated(Counter(run)) for run in runs)


def _verdict(result: dict) -> str:
    if result["interval"] is None:
        return "undecided"
    margin, (low, high) = result["margin"], result["interval"]
    intervals = (result["equivalence_interval"], result["flip_interval"])
    if all(-margin < lower and upper < margin for lower, upper in intervals):
        return "equivalent"
    if result["p"] < SIGNIFICANT and high < 0:
        return "worse"
    if result["p"] < SIGNIFICANT and low > 0:
        return "better"
    return "undecided"


def is_truncated(counts: Mapping[str, int]) -> bool:
    """Whether more than 2 % of the asked problems ran into the token limit."""
    asked = sum(count for category, count in counts.items() if category != NOT_ASKED)
    return counts.get(TRUNCATED, 0) > MANY_TRUNCATED * asked


def _floats(values) -> list[float]:
    return [float(value) for value in values]
