"""The engine's measurements: what is counted, and what a table of them says."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import write_tiny_model
from yardstick.engine import measure
from yardstick.engine.bench import bench_paths, decode_times, drafts, speculation_times
from yardstick.engine.choose import choose
from yardstick.engine.measure import copies_beyond_cache, copy_bandwidth, seconds_each
from yardstick.engine.model import engine_shapes
from yardstick.engine.paths import PATHS
from yardstick.engine.synthetic import random_ids, random_model, random_weight
from yardstick.engine.tune import sweep, tiles
from yardstick.models.config import read_config
from yardstick.models.folder import open_folder
from yardstick.models.generate import Model
from yardstick.models.parts import rotary_table
from yardstick.models.prefill import pick_device
from yardstick.models.state import LayerState
from yardstick.report.speed import (
    decode_table,
    dispatch_line,
    plot_roofline,
    product_table,
    speculation_table,
    speed_document,
)

ROOT = Path(__file__).parents[2]


def product(path, microseconds, chosen=False, rows=1, dtype="float32", share=0.5):
    shape = {"name": "q", "out_features": 576, "in_features": 192, "group_size": 128}
    return shape | {
        "rows": rows,
        "dtype": dtype,
        "path": path,
        "microseconds": microseconds,
        "nbytes": 60000,
        "share": share,
        "chosen": chosen,
    }


def test_time_of_a_call_is_that_of_one_call(monkeypatch):
    """A clock that moves two seconds at each call of three: two seconds each, whatever the rounds."""
    now = 0.0

    def call():
        nonlocal now
        now += 0.002

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert seconds_each([call, call, call], torch.device("cpu")) == pytest.approx(0.002)


def test_copies_leave_no_cache_of_use():
    cpu = torch.device("cpu")
    assert copies_beyond_cache(30_000_000, cpu) == 5 and copies_beyond_cache(400_000_000, cpu) == 1
    assert copies_beyond_cache(1000, cpu) == 1024  # tiny ones are not made by the hundred thousand


def test_every_path_of_the_device_is_timed_and_one_is_chosen(monkeypatch):
    if not torch.cuda.is_available():  # interpreted kernels are slow, and no path of this device
        monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    weight = random_weight(48, 160, 32, pick_device())
    assert abs(float(weight.dequantize().mean())) < 0.01  # codes from 0 to 15 lie around zero
    x = torch.randn(1, 160, device=pick_device())
    here = [name for name, path in PATHS.items() if 1 in path.rows and not path.refusal(weight, pick_device())]
    assert here[:3] == ["dequantize", "dense", "torch-int4"] or torch.cuda.is_available()
    found = list(bench_paths("q", [weight, weight], x, 1e9))
    assert [p.path for p in found] == here and sum(p.chosen for p in found) == 1
    dense = next(p for p in found if p.path == "dense")
    assert dense.nbytes == 4 * (48 * 160 + 160 + 48)
    packed = next(p for p in found if p.path == "dequantize")
    assert packed.nbytes == 48 * 80 + 2 * 2 * 48 * 5 + 4 * (160 + 48)
    assert dense.share == pytest.approx(dense.nbytes / (dense.microseconds * 1e-6) / 1e9)


def test_the_bandwidth_is_one_that_a_machine_can_have(monkeypatch):
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 16 * 2**20)
    assert 1e8 < copy_bandwidth(torch.device("cpu")) < 1e13


def test_a_choice_that_is_slow_is_said():
    fast = [product("dense", 100.0), product("torch-int4", 104.0, chosen=True)]
    assert "within 5 % of the fastest path everywhere" in dispatch_line(fast)
    slow = [product("dense", 100.0), product("torch-int4", 150.0, chosen=True)]
    assert "576 x 192, 1 rows: torch-int4 takes 1.50 times as long as dense" in dispatch_line(slow)
    # another number of rows is another question
    other = [product("dense", 10.0), product("torch-int4", 104.0, chosen=True, rows=8)]
    assert "everywhere" in dispatch_line(other)


def test_the_tables_show_ratios_of_one_run():
    every = [
        product("dense", 400.0),
        product("torch-int4", 100.0, chosen=True),
        product("dense", 200.0, dtype="bfloat16"),
    ]
    lines = product_table(every[:2], every).splitlines()
    assert lines[3] == "| 576 x 192, g128 | 1 | **torch-int4** | 100 | 0.06 | 0.5 | 4.00 | 2.00 |"
    run = {"mode": "packed", "dtype": "float32", "prompt": 256, "steps": 32, "prompt_milliseconds": 512.0}
    run |= {"step_milliseconds": 20.0, "matrix_bytes": 50_000_000, "peak_memory": 1_500_000_000}
    run |= {"written": [7] * 33, "speculation": [], "read_bytes": 72_000_000}
    record = {"bandwidth": 10e9, "decode": [run]}
    # 10 GB/s over 50 MB are 200 tokens a second, of which 50 are reached
    assert decode_table(record).splitlines()[2] == (
        "| packed | float32 | 20.0 | 50.0 | 72 | 50 | 200 | 0.25 | 500 | 1.50 |"
    )
    drafted = {"draft": "prompt lookup", "most": 7, "milliseconds": 8.0, "forwards": 10, "drafted": 60, "accepted": 22}
    drafted |= {"plain_milliseconds": 20.0, "times_plain": 2.5}
    run["speculation"].append(drafted | {"same": 31})
    assert speculation_table(record).splitlines()[2] == (
        "| packed | float32 | prompt lookup, up to 7 | 8.0 | 20.0 | 2.50 | 10 | 22 of 60 | 31 of 33 |"
    )


def test_the_document_has_all_of_it(tmp_path):
    run = {"mode": "packed", "dtype": "float32", "prompt": 256, "steps": 32, "prompt_milliseconds": 512.0}
    run |= {"step_milliseconds": 20.0, "matrix_bytes": 50_000_000, "peak_memory": 1_500_000_000, "speculation": []}
    run["read_bytes"] = 50_000_000
    products = [product("dense", 400.0, chosen=True), product("torch-int4", 500.0)]
    record = {"model": "m", "candidate": "rtn-g128", "device": "a card", "bandwidth": 10e9, "products": products}
    text = speed_document(record | {"decode": [run]})
    for part in ("# Speed of the packed weights: m, `rtn-g128`", "a card; a copy moves 10.0 GB/s", "Inputs of float32"):
        assert part in text
    plot_roofline(record | {"decode": [run]}, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes()[:4] == b"\x89PNG"


def test_tiles_have_the_batch_that_holds_the_rows():
    assert {tile["batch"] for tile in tiles("triton-gemm", 2)} == {16}
    assert {tile["batch"] for tile in tiles("triton-gemm", 33)} == {64}
    assert len(list(tiles("triton-gemv", 1))) == 36 and list(tiles("dense", 5)) == [{}]


def test_a_sweep_gives_the_fastest_first():
    weight = random_weight(48, 160, 32, pick_device())
    x = torch.randn(2, 160, device=pick_device())
    entries = sweep([weight], x, ["dequantize", "dense", "triton-gemv"])  # the last takes one row alone
    assert {entry.path for entry in entries} == {"dequantize", "dense"}
    assert entries[0].microseconds <= entries[1].microseconds
    assert choose(weight, torch.float32, 2, entries[:1]).path == entries[0].path


@torch.no_grad()
def test_a_model_of_random_weights_decodes(tmp_path):
    """The shapes are those of the config, and what it writes is what dequantized weights write."""
    config = read_config(write_tiny_model(tmp_path / "m", "qwen3_5", tied=False, layers=4) / "config.json")
    model = random_model(config, 4, 32, torch.float32, pick_device())
    times = decode_times(model, random_ids(200, 6), 4)
    assert len(times["written"]) == 5
    assert times["step_milliseconds"] > 0 and times["prompt_milliseconds"] > 0
    shapes = engine_shapes(config, lambda name: 32)
    joined = "self_attn.q_proj+self_attn.k_proj+self_attn.v_proj"
    linears = config.layer_linears(3)
    rows = sum(linears[name][0] for name in joined.split("+"))
    assert shapes[joined] == (rows, config.hidden_size, 32)
    assert tuple(model.layers[3][joined].linear.codes.shape) == (rows, config.hidden_size // 2)
    states, rotary = [LayerState(3) for _ in range(4)], rotary_table(config, 3, model.device, model.dtype)
    hidden = model.hidden_states(torch.tensor([[3, 5, 7]]), states, rotary)
    assert 0.5 < float(hidden.std()) < 2  # a norm of gain 1 behind layers that keep their size


def test_the_check_of_a_card_runs_up_to_the_card():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    found = subprocess.run([sys.executable, "bench/gpu_check.py"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr == "yardstick: 7 shapes are ready to be checked, but there is no CUDA device here\n"


def test_drafting_is_timed_against_the_same_text(tmp_path):
    folder = write_tiny_model(tmp_path / "m", "llama", tied=True, layers=2)
    original = open_folder(folder)
    with torch.no_grad():
        model = Model(original.source, original.config, torch.float32, 512)
        ids = random_ids(512, 9)
        plain = decode_times(model, ids, 12)
        assert set(drafts(original, model, 40)) == {"prompt lookup"}
        right = lambda: lambda known, hidden, most: plain["written"][len(known) - 9 :][:most]  # noqa: E731
        found = speculation_times(model, ids, plain["written"], right, 4, 40)
        # the first id comes with the prompt; 12 more, 5 a forward
        assert (found["forwards"], found["drafted"], found["same"]) == (3, 10, 13) and found["milliseconds"] > 0
        other = [(plain["written"][0] + 1) % 512, *plain["written"][1:]]
        assert speculation_times(model, ids, other, right, 4, 40)["same"] == 0
