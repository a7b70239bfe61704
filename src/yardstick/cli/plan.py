"""Say what an experiment takes before anything is downloaded: bytes, disk, memory and time of each step."""

import shutil
import sys
import time
from pathlib import Path

import torch

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.load_experiment import load_experiment
from yardstick.models.prefill import DTYPES, exact_arithmetic, pick_device
from yardstick.plan.sizes import Weights
from yardstick.plan.steps import ModelPlan, Rates, Step, missing_bytes
from yardstick.report.markdown import table
from yardstick.schema import read_yaml


def main(arguments) -> None:
    experiment = load_experiment(read_yaml(arguments.config))
    given = {"float32": arguments.gflops_float32, "bfloat16": arguments.gflops_bfloat16}
    products = {name: 1e9 * rate if rate else measured_rate(DTYPES[name]) for name, rate in given.items()}
    rates = Rates(products, 1e6 * arguments.disk_mb, 1e6 * arguments.network_mb)
    needed = 0.0
    for model in experiment.models:
        plan = ModelPlan(experiment, model, rates)
        steps = plan.steps()
        needed += missing_bytes(steps)
        print(f"## {model}\n\n{steps_table(steps)}\n\n{weights_table(plan.weights(), arguments.bandwidth_gb)}\n")
    for name, reason in experiment.unreadable.items():
        print(f"Not planned: {name}: {reason}.")
    tools = experiment.tools()
    if tools:
        print(f"Not counted: environments of {', '.join(tools)}, about 1.5 GB each, and the time of these tools.")
    free = shutil.disk_usage(Path.cwd()).free
    speeds = ", ".join(
        f"{name} {rate / 1e9:.0f} GFLOP/s ({'given' if given[name] else f'measured on {pick_device()} just now'})"
        for name, rate in products.items()
    )
    print(
        f"Rates: {speeds}; disk {arguments.disk_mb:g} MB/s and network "
        f"{arguments.network_mb:g} MB/s assumed. Memory and time are estimates; bytes follow from the shapes.\n"
        f"Disk still needed: {needed / 1e9:.2f} GB; free here: {free / 1e9:.2f} GB. Rivals from the hub "
        "are deleted when they have been measured, so the largest of them counts."
    )
    sys.stdout.flush()
    if needed > free:
        raise YardstickError(
            f"plan: the experiment still needs {needed / 1e9:.2f} GB of disk, {Path.cwd()} has {free / 1e9:.2f} GB free"
        )


def measured_rate(dtype: torch.dtype, size: int = 2048, seconds: float = 0.5) -> float:
    """Operations a second of a square matrix product in `dtype` on this machine."""
    exact_arithmetic()
    device = pick_device()
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    count, started = 0, 0.0
    while count < 2 or time.perf_counter() - started < seconds:
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        count += 1
        if count == 1:  # the first one also sets things up
            started = time.perf_counter()
    return (count - 1) * 2 * size**3 / (time.perf_counter() - started)


def positive(text: str) -> float:
    """A rate from the command line."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def steps_table(steps: list[Step]) -> str:
    """All steps, with their sums; the memory of the whole is that of its largest step."""
    rows = [
        [step.name, *(gigabytes(v) for v in (step.reads, step.disk, step.memory)), duration(step.seconds)]
        for step in steps
    ]
    sums = [sum(step.reads for step in steps), sum(step.disk for step in steps), max(step.memory for step in steps)]
    rows.append(["**all**", *map(gigabytes, sums), duration(sum(step.seconds for step in steps))])
    return table(["step", "reads GB", "disk GB", "peak memory GB", "time"], rows)


def weights_table(weights: list[Weights], bandwidth: float) -> str:
    """Stored bytes of each candidate, and the most tokens a second that the bandwidth lets a single stream decode."""
    rows = [
        [w.name, f"{w.bits:.2f}", gigabytes(w.stored), gigabytes(w.per_token), f"{1e9 * bandwidth / w.per_token:.1f}"]
        for w in weights
    ]
    header = ["candidate", "bits per weight", "stored GB", "read per token GB", f"tokens/s at {bandwidth:g} GB/s"]
    return table(header, rows)


def add_arguments(arguments) -> None:
    arguments.add_argument("--config", type=Path, default=Path("config/config.yaml"), help="the experiment's config")
    for name in DTYPES:
        text = f"rate of matrix products in {name}; measured on this machine if left out"
        arguments.add_argument(f"--gflops-{name}", type=positive, help=text)
    arguments.add_argument("--disk-mb", type=positive, default=1000.0, help="MB/s that a step reads and hashes")
    arguments.add_argument("--network-mb", type=positive, default=50.0, help="MB/s of downloads")
    arguments.add_argument("--bandwidth-gb", type=positive, default=1701.0, help="GB/s of memory, for the ceiling")


if __name__ == "__main__":
    arguments = parser(__doc__)
    add_arguments(arguments)
    run_step(main, arguments)
