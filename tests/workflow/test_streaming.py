"""A checkpoint that is larger than the memory it is measured in: one layer at a time, embedding and head by rows."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from tests.large import CONFIG, peak_gigabytes, write_large_model
from tests.tiny import write_tiny_model
from yardstick.corpora.manifest import ids_sha256
from yardstick.evaluate.reference import load_states
from yardstick.load_experiment import load_experiment
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states
from yardstick.plan.steps import ModelPlan, Rates

ROOT = Path(__file__).parents[2]

GIGABYTES, LIMIT = 3.0, 1.5


def planned(model: Path, chunks: int, length: int) -> ModelPlan:
    """The plan of an experiment with the model."""
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["models"] = {"m": {"kind": "local", "path": str(model)}}
    evaluation = config["corpora"]["evaluation"]
    evaluation["length"], evaluation["texts"] = length, {"math": evaluation["texts"]["math"] | {"chunks": chunks}}
    return ModelPlan(load_experiment(config), "m", Rates({"float32": 1e11, "bfloat16": 1e11}, 1e9, 1e8))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_long_context_stays_within_the_plan(tmp_path, family):
    """8192 positions: three heads' scores alone would take 0.8 GB if they were held at once."""
    length, model = 8192, write_tiny_model(tmp_path / "model", family, tied=False, layers=4)
    ids = np.random.default_rng(0).integers(0, 512, size=(2, length + 1)).astype(np.int32)
    np.savez(tmp_path / "chunks.npz", text=ids)
    (tmp_path / "corpora.json").write_text(json.dumps({"vocabulary": 512}))
    recipe = json.dumps({"kind": "local", "path": str(model)})
    peak_gigabytes(tmp_path, "build_model", "--recipe", recipe, "--downloads", "x", "--output", "manifest.json")
    files = ("--model", "manifest.json", "--chunks", "chunks.npz", "--corpora", "corpora.json")
    settings = '{"dtype": "float32", "batch_chunks": 1}'
    peak = peak_gigabytes(
        tmp_path, "build_reference", "--recipe", settings, *files, "--output", "manifest-of-states.json"
    )
    expected = planned(model, chunks=2, length=length).reference().memory / 1e9
    print(f"{family}: peak {peak:.2f} GB, planned {expected:.2f} GB")
    assert peak <= 1.1 * expected < 0.35 + 0.8 / 2
    # and the far end sees the near one: another first token changes the last state
    config, source = open_folder(model).config, open_folder(model).source
    other = torch.from_numpy(ids[:1, :-1]).long()
    states = final_hidden_states(source, config, other, torch.float32, 1)
    stored = load_states(tmp_path / "states.safetensors")
    torch.testing.assert_close(states[0], stored[0], rtol=1e-4, atol=1e-4)
    other[0, 0] = (other[0, 0] + 1) % 512
    assert not torch.equal(final_hidden_states(source, config, other, torch.float32, 1)[0, -1], states[0, -1])


@pytest.fixture
def large_model(tmp_path):
    if shutil.disk_usage(tmp_path).free < 5e9:
        pytest.skip("needs 5 GB of disk")
    yield tmp_path / "model", write_large_model(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")


def test_three_gigabytes_are_measured_in_half_of_it(tmp_path, large_model):
    model, size = large_model
    assert size > 0.95 * GIGABYTES * 1e9
    draw = np.random.default_rng(0)
    ids = draw.integers(0, CONFIG["vocab_size"], size=(2, 65)).astype(np.int32)
    np.savez(tmp_path / "chunks.npz", text=ids)
    (tmp_path / "corpora.json").write_text(json.dumps({"vocabulary": CONFIG["vocab_size"], "ids": ids_sha256(ids)}))
    common = ("--model", "manifest.json", "--chunks", "chunks.npz", "--corpora", "corpora.json")
    peaks = {
        "fetch": peak_gigabytes(
            tmp_path,
            "build_model",
            *("--recipe", json.dumps({"kind": "local", "path": str(model)})),
            *("--downloads", "downloads", "--output", "manifest.json"),
        ),
        "reference": peak_gigabytes(
            tmp_path,
            "build_reference",
            *("--recipe", '{"dtype": "float32", "batch_chunks": 2}', *common, "--output", "manifest-of-states.json"),
        ),
    }
    measured = {"source": "hf", "forward": "yardstick", "dtype": "float32", "batch_chunks": 2}
    for name, change in (("again", {}), ("bf16", {"dtype": "bfloat16"})):
        recipe = {"model": "large", "candidate": {"kind": "noise-hf"}, "evaluate": measured | change}
        outputs = ("--positions", f"{name}.parquet", "--output", f"{name}.json")
        peaks[name] = peak_gigabytes(
            tmp_path,
            "evaluate",
            *("--recipe", json.dumps(recipe), "--name", name, *common),
            *("--reference", "manifest-of-states.json", *outputs),
        )
    print({name: f"{peak:.2f} GB" for name, peak in peaks.items()})
    assert max(peaks.values()) <= LIMIT, peaks
    plan = planned(model, chunks=2, length=64)
    assert peaks["reference"] <= 1.1 * plan.reference().memory / 1e9 <= LIMIT
    assert float(pd.read_parquet(tmp_path / "again.parquet")["kl"].abs().max()) == 0.0
    assert 0 < float(pd.read_parquet(tmp_path / "bf16.parquet")["kl"].mean()) < 0.05
