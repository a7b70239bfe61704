"""Check, tune and time the engine on a CUDA card: `python bench/gpu_check.py --output gpu.json`.

Every kernel is held against its twin on fresh random inputs at the shapes of a model (the 27B one by default), tiles
are swept, products timed against the bandwidth of a copy, and decoding is measured on a model of that shape with random
weights and as many layers as the time allows. The JSON is written after each part: what was reached by then is kept.
Its `tuned` is what goes into src/yardstick/engine/tuned.py under the card's name.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch

from yardstick.engine.bench import decode_times
from yardstick.engine.choose import device_name
from yardstick.engine.graphs import GraphStep
from yardstick.engine.measure import copy_bandwidth
from yardstick.engine.model import engine_shapes
from yardstick.engine.synthetic import random_ids, random_model, random_weight, random_weights
from yardstick.engine.tune import sweep
from yardstick.errors import YardstickError
from yardstick.files import write_json
from yardstick.models.config import read_config
from yardstick.models.generate import EagerStep

GROUP, ROWS, BOUND = 128, (1, 2, 8, 32), 1e-3
PARTS = {"check": 0.25, "tune": 0.65, "decode": 1.0}  # share of the time by whose end a part stops


def check(shapes: dict, device: torch.device, deadline: float) -> list[dict]:
    """Relative error of each kernel against its twin: ||out - twin|| / ||twin||."""
    from yardstick.engine.kernels.gemm import gemm
    from yardstick.engine.kernels.gemv import gemv
    from yardstick.engine.kernels.shuffled import shuffle, shuffled_gemm
    from yardstick.engine.kernels.twins import grouped_matmul

    found = []
    for name, (out_features, in_features, _) in shapes.items():
        weight = random_weight(out_features, in_features, GROUP, device)
        shuffled = shuffle(weight, 64)
        for rows in ROWS:
            if time.monotonic() > deadline:
                return found
            x = torch.randn(rows, in_features, device=device).bfloat16()
            twin = grouped_matmul(x, weight)
            batch = 16 if rows <= 16 else 32
            outs = {"shuffled": shuffled_gemm(x, shuffled, batch)}
            if rows == 1:
                outs |= {"gemv": gemv(x, weight, 16, 1), "gemv split 3": gemv(x, weight, 16, 1, 3)}
            else:
                outs |= {"gemm": gemm(x, weight, batch, 64), "gemm split 2": gemm(x, weight, batch, 64, 2)}
            for kernel, out in outs.items():
                error = float((out - twin).norm() / twin.norm())
                entry = {"matrix": name, "shape": [out_features, in_features], "rows": rows, "kernel": kernel}
                found.append(entry | {"error": error, "passed": error <= BOUND})
    return found


def tune(shapes: dict, device: torch.device, bandwidth: float, deadline: float) -> tuple[list, list]:
    """The fastest entry of each shape and number of rows, and all of them with the share of the bandwidth."""
    best, every = [], []
    for rows in (1, 8, 32):
        for out_features, in_features, _ in shapes.values():
            if time.monotonic() > deadline:
                return best, every
            weights = random_weights(out_features, in_features, GROUP, device)
            entries = sweep(weights, torch.randn(rows, in_features, device=device).bfloat16())
            nbytes = weights[0].nbytes + 2 * rows * (in_features + out_features)
            best.append(asdict(entries[0]))
            every += [asdict(entry) | {"share": nbytes / entry.microseconds * 1e6 / bandwidth} for entry in entries]
    return best, every


def decode(config, device: torch.device, bandwidth: float, deadline: float) -> list[dict]:
    """Decoding with 4, 8, 16, ... layers, each step started kernel by kernel and as one graph."""
    found, layers = [], 4
    while layers <= config.num_layers and time.monotonic() < deadline:
        model = random_model(config, layers, GROUP, torch.bfloat16, device)
        packed = [
            module for weights in model.layers for module in weights.values() if isinstance(module, torch.nn.Module)
        ]
        nbytes = sum(getattr(module, "linear", module).packed.nbytes for module in [*packed, model.head])
        for kind, stepper in (("eager", EagerStep), ("graph", GraphStep)):
            times = decode_times(model, random_ids(config.vocab_size, 256), 32, stepper)
            reached = nbytes / times["step_milliseconds"] * 1e3 / bandwidth
            found.append({"layers": layers, "kind": kind, "matrix_bytes": nbytes, "share": reached} | times)
        layers *= 2
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", type=Path, default=ROOT / "config/architectures/qwen3.8-27b.json")
    parser.add_argument("--seconds", type=float, default=280.0, help="time for all of it")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    arguments = parser.parse_args()
    config = read_config(arguments.architecture)
    shapes = engine_shapes(config, lambda name: GROUP)
    if not torch.cuda.is_available():
        raise YardstickError(f"{len(shapes)} shapes are ready to be checked, but there is no CUDA device here")
    started, device = time.monotonic(), torch.device("cuda")
    torch.manual_seed(time.time_ns() % 2**31)  # fresh inputs each time
    torch.set_grad_enabled(False)
    deadlines = {name: started + share * arguments.seconds for name, share in PARTS.items()}
    record = {"device": device_name(device), "date": time.strftime("%Y-%m-%d"), "shapes": shapes}
    record["versions"] = {"torch": torch.__version__, "triton": __import__("triton").__version__}
    record["bandwidth"] = copy_bandwidth(device)
    record["check"] = check(shapes, device, deadlines["check"])
    write_json(arguments.output, record)
    record["tuned"], record["sweep"] = tune(shapes, device, record["bandwidth"], deadlines["tune"])
    write_json(arguments.output, record)
    record["decode"] = decode(config, device, record["bandwidth"], deadlines["decode"])
    record["seconds"] = time.monotonic() - started
    write_json(arguments.output, record)
    failed = [entry for entry in record["check"] if not entry["passed"]]
    summary = {"checked": len(record["check"]), "failed": failed, "seconds": record["seconds"]}
    print(
        json.dumps(summary | {"bandwidth": record["bandwidth"], "tuned": record["tuned"], "decode": record["decode"]})
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    try:
        main()
    except YardstickError as error:
        sys.exit(f"yardstick: {error}")
