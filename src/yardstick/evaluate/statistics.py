"""Summaries of positions: means, quantiles, intervals. No model is run here.

Positions of one chunk share their text, so they are not independent: every interval resamples whole chunks.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
FIRST_POSITIONS = 64
RESAMPLES = 2000
GIVEN = 16  # positions of a window of the model's own text that need not have been drawn
INTERVAL = (2.5, 97.5)


def summarize(frame: pd.DataFrame, seed: int = 0, own_texts: Sequence[str] = ()) -> dict:
    """Figures of all positions: `kl`, `top1`, `ppl`, `delta_p`; `confidence` and `by_position`, which hold buckets;
    and `corpora`, with the first four for each. `own_texts` names corpora that the model itself has written: they have
    figures of their own, and are in no figure over all."""
    others = leave_out(frame, own_texts)
    summary = summarize_part(others, seed)
    summary["confidence"] = confidence_buckets(others)
    summary["by_position"] = position_buckets(others)
    summary["corpora"] = {
        str(name): summarize_part(part, seed) for name, part in frame.groupby("corpus", observed=True, sort=False)
    }
    for name in own_texts:
        summary["corpora"][name]["ruler"] = ruler_check(frame[frame["corpus"] == name])
    return summary


def leave_out(frame: pd.DataFrame, corpora: Sequence[str]) -> pd.DataFrame:
    """Positions of all other corpora."""
    return frame[~frame["corpus"].isin(corpora)] if len(corpora) else frame


def ruler_check(frame: pd.DataFrame) -> dict:
    """Two estimates of one figure, on text that was drawn from the reference p: E[log p(x) - log q(x)] = KL(p || q).

    The first positions of a window are left out, since what it starts with was given and not drawn.

    The difference of each position, (nll - reference_nll) - kl, has the mean 0 whatever came before it (it is a
    martingale difference), so its standard error is that of independent positions: sqrt(sum d^2) / n. Returns the two
    means, the standard error `error` of their difference, and `z`, the difference over it (None where both are 0).
    """
    drawn = frame[frame["position"] >= GIVEN]
    if drawn.empty:
        return {"kl": None, "nll_difference": None, "error": None, "z": None}
    difference = (drawn["nll"] - drawn["reference_nll"]).to_numpy()
    kl = drawn["kl"].to_numpy()
    gap = difference - kl
    error = math.sqrt(float(np.square(gap).sum())) / len(gap)
    z = float(gap.mean()) / error if error > 0 else None
    return {"kl": float(kl.mean()), "nll_difference": float(difference.mean()), "error": error, "z": z}


def summarize_part(frame: pd.DataFrame, seed: int) -> dict:
    """Figures of one set of positions. KL and NLL are in nats."""
    kl = frame["kl"].to_numpy()
    delta_p = frame["label_delta_p"].to_numpy(dtype=np.float64)
    agree = (frame["top1"] == frame["reference_top1"]).to_numpy(dtype=np.float64)
    chunk = frame["chunk"].to_numpy()
    quantiles = np.quantile(kl, list(QUANTILES.values()))
    return {
        "positions": len(frame),
        "kl": {
            "mean": float(kl.mean()),
            "interval": cluster_interval(kl, chunk, seed),
            **{name: float(value) for name, value in zip(QUANTILES, quantiles, strict=True)},
            "max": float(kl.max()),
        },
        "top1": float(agree.mean()),
        "top1_interval": cluster_interval(agree, chunk, seed),
        "ppl": perplexity(frame),
        "delta_p": {"mean": float(delta_p.mean()), "rms": float(np.sqrt(np.square(delta_p).mean()))},
    }


def perplexity(frame: pd.DataFrame) -> dict:
    """exp(sum of NLL / positions) of both models, their difference, and their ratio with a standard error that keeps
    the covariance.

    The two NLLs of a position go up and down together, so the error of the log ratio is that of the mean of their
    difference, from chunk means (sandwich estimate for clusters). It is None with a single chunk.
    """
    reference, candidate = frame["reference_nll"].to_numpy(), frame["nll"].to_numpy()
    values = {"reference": math.exp(float(reference.mean())), "candidate": math.exp(float(candidate.mean()))}
    log_ratio = float((candidate - reference).mean())
    sums, counts = _cluster_sums(candidate - reference, frame["chunk"].to_numpy())
    error = None
    if len(sums) > 1:
        residuals = sums - counts * log_ratio
        spread = math.sqrt(float(np.square(residuals).sum()) * len(sums) / (len(sums) - 1))
        error = math.exp(log_ratio) * spread / float(counts.sum())
    return {
        **values,
        "difference": values["candidate"] - values["reference"],
        "ratio": math.exp(log_ratio),
        "ratio_error": error,
    }


def confidence_buckets(frame: pd.DataFrame) -> list[dict]:
    """KL and top-1 agreement by how sure the reference was of its first choice."""
    probability = frame["reference_top1_probability"].to_numpy(dtype=np.float64)
    return _buckets(frame, np.clip(probability, 0.0, np.nextafter(1.0, 0.0)), CONFIDENCE_EDGES)


def position_buckets(frame: pd.DataFrame) -> list[dict]:
    """KL and top-1 agreement by the position in the chunk: how an error grows with the context before it.

    Buckets double: 0 to 63, 64 to 127, 128 to 255, and so on to the chunk's length.
    """
    position, edges = frame["position"].to_numpy(), [0, FIRST_POSITIONS]
    while edges[-1] <= position.max():
        edges.append(2 * edges[-1])
    return _buckets(frame, position, [*edges[:-1], int(position.max()) + 1])


def _buckets(frame: pd.DataFrame, values: np.ndarray, edges) -> list[dict]:
    """Positions, mean KL and top-1 agreement where from <= value < to."""
    bucket = np.digitize(values, edges) - 1
    agree, kl = (frame["top1"] == frame["reference_top1"]).to_numpy(), frame["kl"].to_numpy()
    result = []
    for index, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        inside = bucket == index
        count = int(inside.sum())
        result.append(
            {
                "from": low,
                "to": high,
                "positions": count,
                "kl": float(kl[inside].mean()) if count else None,
                "top1": float(agree[inside].mean()) if count else None,
            }
        )
    return result


def _cluster_sums(values: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and count of `values` in each cluster."""
    _, index = np.unique(clusters, return_inverse=True)
    return np.bincount(index, weights=values), np.bincount(index).astype(np.float64)


def cluster_interval(values: np.ndarray, clusters: np.ndarray, seed: int) -> list[float] | None:
    """95 % percentile bootstrap interval of the mean, resampling whole clusters; None with a single cluster."""
    sums, counts = _cluster_sums(values, clusters)
    if len(sums) < 2:
        return None
    picks = np.random.Generator(np.random.PCG64(seed)).integers(0, len(sums), size=(RESAMPLES, len(sums)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    return [float(value) for value in np.percentile(means, INTERVAL)]


def paired_difference(frame: pd.DataFrame, baseline: pd.DataFrame, seed: int = 0) -> dict:
    """Mean KL of `frame` minus that of `baseline` on the same positions, with its paired interval.

    Raises:
        ValueError: the two were not measured on the same positions.
    """
    keys = ["corpus", "chunk", "position"]
    if len(frame) != len(baseline) or not (frame[keys].astype(str).values == baseline[keys].astype(str).values).all():
        raise ValueError("the two candidates were measured on different positions")
    difference = frame["kl"].to_numpy() - baseline["kl"].to_numpy()
    interval = cluster_interval(difference, frame["chunk"].to_numpy(), seed)
    return {"mean": float(difference.mean()), "interval": interval}
