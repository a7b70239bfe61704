import math

import numpy as np
import pandas as pd
import pytest

from yardstick.errors import YardstickError
from yardstick.evaluate.positions import COLUMNS, read_positions, write_positions
from yardstick.evaluate.statistics import (
    cluster_interval,
    confidence_buckets,
    paired_difference,
    perplexity,
    position_buckets,
    ruler_check,
    summarize,
)


def frame(**columns) -> pd.DataFrame:
    count = len(next(iter(columns.values())))
    values = {name: np.zeros(count) for name in COLUMNS} | {"corpus": ["a"] * count, "position": np.arange(count)}
    return pd.DataFrame(values | columns).astype(COLUMNS)


def test_perplexity_weighs_tokens_not_windows():
    rows = frame(nll=[1.0, 1.0, 1.0, 5.0], chunk=[0, 0, 0, 1])
    assert perplexity(rows)["candidate"] == pytest.approx(math.exp(2.0))


def test_error_of_the_perplexity_ratio_is_paired_and_by_chunk():
    noise = np.random.default_rng(0).normal(3, 1, 4000)
    chunks = np.repeat(np.arange(40), 100)
    same = perplexity(frame(nll=noise + 0.1, reference_nll=noise, chunk=chunks))
    assert same["ratio"] == pytest.approx(math.exp(0.1))
    assert same["ratio_error"] == pytest.approx(0.0, abs=1e-9)
    shift = np.repeat(np.random.default_rng(1).normal(0, 0.2, 40), 100)
    moved = perplexity(frame(nll=noise + shift, reference_nll=noise, chunk=chunks))
    expected = moved["ratio"] * shift[::100].std(ddof=1) / math.sqrt(40)
    assert moved["ratio_error"] == pytest.approx(expected, rel=1e-6)


def test_summary_by_hand():
    rows = frame(
        kl=[0.0, 0.1, 0.2, 0.7],
        top1=[1, 2, 3, 4],
        reference_top1=[1, 2, 3, 5],
        label_delta_p=[0.0, 0.3, -0.3, 0.4],
        corpus=["a", "a", "b", "b"],
        chunk=[0, 0, 1, 1],
    )
    summary = summarize(rows)
    assert summary["kl"]["mean"] == pytest.approx(0.25)
    assert summary["kl"]["median"] == pytest.approx(0.15)
    assert summary["kl"]["max"] == pytest.approx(0.7)
    assert summary["top1"] == 0.75
    assert summary["delta_p"]["mean"] == pytest.approx(0.1)
    assert summary["delta_p"]["rms"] == pytest.approx(math.sqrt(0.34 / 4))
    assert summary["corpora"]["b"]["kl"]["mean"] == pytest.approx(0.45)
    assert summary["corpora"]["a"]["kl"]["interval"] is None  # one chunk says nothing about spread
    assert summary["positions"] == 4


def test_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(3)
    covered = 0
    for seed in range(200):
        chunk_means = rng.normal(0, 1, 30)
        values = np.repeat(chunk_means, 20) + rng.normal(0, 0.3, 600)
        low, high = cluster_interval(values, np.repeat(np.arange(30), 20), seed)
        covered += low <= 0 <= high
    assert 175 <= covered <= 199  # 95 % of 200 is 190; resampling positions instead would cover about 70


def test_paired_difference_is_on_the_same_positions():
    ours, other = frame(kl=[0.1, 0.3], chunk=[0, 1]), frame(kl=[0.2, 0.5], chunk=[0, 1])
    assert paired_difference(ours, other)["mean"] == pytest.approx(-0.15)
    with pytest.raises(ValueError, match="different positions"):
        paired_difference(ours, frame(kl=[0.2, 0.5], chunk=[0, 2]))
    with pytest.raises(ValueError, match="different positions"):
        paired_difference(ours, frame(kl=[0.2], chunk=[0]))


def test_confidence_buckets_hold_every_position_once():
    rows = frame(kl=[1.0, 2.0, 3.0, 4.0], reference_top1_probability=[0.0, 0.25, 0.89, 1.0])
    buckets = confidence_buckets(rows)
    assert [b["positions"] for b in buckets] == [1, 1, 0, 1, 1]
    assert [b["kl"] for b in buckets] == [1.0, 2.0, None, 3.0, 4.0]


def test_positions_survive_the_file_and_damage_is_named(tmp_path):
    rows = frame(kl=[0.1, 1e-12], corpus=["prose", "code"])
    path = tmp_path / "positions.parquet"
    write_positions(path, rows)
    assert read_positions(path)["kl"].tolist() == [0.1, 1e-12]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(YardstickError, match="positions.parquet: damaged"):
        read_positions(path)
    with pytest.raises(YardstickError, match="no such file"):
        read_positions(tmp_path / "none.parquet")


def test_buckets_of_positions_double_and_end_at_the_chunk():
    position = np.tile(np.arange(300), 2)
    rows = frame(position=position, kl=position.astype(float), chunk=np.repeat([0, 1], 300))
    buckets = position_buckets(rows)
    assert [(b["from"], b["to"]) for b in buckets] == [(0, 64), (64, 128), (128, 256), (256, 300)]
    assert [b["positions"] for b in buckets] == [128, 128, 256, 88]
    assert [b["kl"] for b in buckets] == [31.5, 95.5, 191.5, 277.5]
    edge = position_buckets(frame(position=np.arange(64)))
    assert [(b["from"], b["to"], b["positions"]) for b in edge] == [(0, 64, 64)]


def test_the_ruler_check_by_hand():
    """Positions 16 to 19 count: differences 0.5, 0.1, 0.2, 0.4 against KLs of 0.2, 0.2, 0.3, 0.1."""
    nll = np.concatenate([np.full(16, 9.0), [1.5, 2.1, 3.2, 4.4]])
    reference = np.concatenate([np.zeros(16), [1.0, 2.0, 3.0, 4.0]])
    kl = np.concatenate([np.full(16, 7.0), [0.2, 0.2, 0.3, 0.1]])
    found = ruler_check(frame(nll=nll, reference_nll=reference, kl=kl))
    assert found["kl"] == pytest.approx(0.2) and found["nll_difference"] == pytest.approx(0.3)
    # gaps 0.3, -0.1, -0.1, 0.3: sqrt(0.2) / 4
    assert found["error"] == pytest.approx(math.sqrt(0.2) / 4) and found["z"] == pytest.approx(
        0.1 / (math.sqrt(0.2) / 4)
    )
    assert ruler_check(frame(nll=[1.0], reference_nll=[1.0], kl=[0.0])) == dict.fromkeys(found)
    same = ruler_check(frame(nll=nll, reference_nll=nll, kl=np.zeros(20)))
    assert same == {"kl": 0.0, "nll_difference": 0.0, "error": 0.0, "z": None}


def test_on_drawn_text_the_difference_of_the_nlls_is_the_kl_and_on_other_text_it_is_not():
    rng = np.random.default_rng(2)
    p, q = (rng.dirichlet(np.full(50, 0.3), 5000).clip(1e-9) for _ in range(2))
    p, q = p / p.sum(1, keepdims=True), 0.8 * p / p.sum(1, keepdims=True) + 0.2 * q / q.sum(1, keepdims=True)
    kl = (p * np.log(p / q)).sum(1)
    rows, z = np.arange(5000), {}
    for name, source in (("drawn", p), ("other", q)):
        ids = np.array([rng.choice(50, p=row) for row in source])
        nlls = {"nll": -np.log(q[rows, ids]), "reference_nll": -np.log(p[rows, ids])}
        z[name] = ruler_check(frame(kl=kl, position=rows % 100 + 16, **nlls))["z"]
    assert abs(z["drawn"]) < 3 < abs(z["other"])


def test_own_text_is_in_no_figure_over_all():
    kl, corpus = np.array([0.1, 0.3, 5.0, 7.0]), ["a", "a", "own", "own"]
    rows = frame(kl=kl, corpus=corpus, position=[0, 1, 16, 17], nll=kl, reference_top1_probability=[0.1] * 4)
    found = summarize(rows, own_texts=["own"])
    assert found["kl"]["mean"] == pytest.approx(0.2) and found["positions"] == 2
    assert found["corpora"]["own"]["kl"]["mean"] == pytest.approx(6.0) and "ruler" not in found["corpora"]["a"]
    assert found["corpora"]["own"]["ruler"]["nll_difference"] == pytest.approx(6.0)
    assert sum(bucket["positions"] for bucket in found["confidence"]) == 2
