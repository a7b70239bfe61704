"""Which path a product takes: read from a table of what was measured on this device, never decided while running.

The same device and the same table give the same path, and so the same last digits. `tuned.py` beside this file holds,
for each device, one entry a shape and number of rows: the fastest path and tile of a sweep (`tune.sweep`). A shape that
was not measured takes the entry of the nearest one; a device that was not measured takes the defaults below.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from yardstick.engine.paths import MOST_ROWS, PATHS
from yardstick.engine.tuned import TUNED
from yardstick.engine.weight import PackedWeight
from yardstick.provenance import machine


@dataclass(frozen=True)
class Choice:
    """A path, its tile, and why it was chosen, in words for `engine.explain`."""

    path: str
    tile: dict[str, int] = field(default_factory=dict)
    why: str = "asked for"


@dataclass(frozen=True)
class Entry:
    """The fastest path that was measured for one shape."""

    dtype: str
    out_features: int
    in_features: int
    group_size: int
    rows: int
    path: str
    tile: dict[str, int]
    microseconds: float


def device_name(device: torch.device) -> str:
    """What a table is called after: the card, or the processor and the threads that torch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{machine()['cpu']}, {torch.get_num_threads()} threads"


@cache
def table(name: str) -> tuple[Entry, ...]:
    """Entries of one device; none where it was not measured."""
    return tuple(Entry(**entry) for entry in TUNED.get(name, ()))


def choose(weight: PackedWeight, dtype: torch.dtype, rows: int, entries: Sequence[Entry] | None = None) -> Choice:
    """The path for `rows` rows of inputs of one type; `entries` are those of the weight's device if left out."""
    device = weight.codes.device
    name = device_name(device)
    entries = table(name) if entries is None else entries
    kind = str(dtype).removeprefix("torch.")
    fitting = [
        entry
        for entry in entries
        if (entry.dtype, entry.group_size) == (kind, weight.group_size)
        and rows in PATHS[entry.path].rows
        and PATHS[entry.path].refusal(weight, device) is None
    ]
    if not fitting:
        return default(weight, dtype, rows, name)
    size = weight.out_features * weight.in_features

    def distance(entry: Entry) -> tuple[float, float]:
        shape = abs(math.log(entry.out_features * entry.in_features / size))
        return abs(math.log(entry.rows / rows)), shape

    best = min(fitting, key=distance)
    measured = f"{best.out_features} x {best.in_features}, {best.rows} rows: {best.microseconds:.0f} us on {name}"
    return Choice(best.path, best.tile, f"fastest of those measured at {measured}")


def default(weight: PackedWeight, dtype: torch.dtype, rows: int, name: str) -> Choice:
    """Without a measurement: Triton on CUDA for up to 64 rows where it takes the groups; on the CPU torch's int4
    product for bf16 inputs, and dense weights for fp32 ones, for which that product is slow (docs/log.md)."""
    why = f"default: nothing was measured on {name}"
    device = weight.codes.device
    if device.type == "cpu":
        int4 = dtype == torch.bfloat16 and PATHS["torch-int4"].refusal(weight, device) is None
        return Choice("torch-int4" if int4 else "dense", {}, why)
    path = "triton-gemv" if rows == 1 else "triton-gemm"
    if rows > MOST_ROWS:
        return Choice("dequantize", {}, f"more than {MOST_ROWS} rows are bound by arithmetic")
    if reason := PATHS[path].refusal(weight, device):
        return Choice("dequantize", {}, f"{path}: {reason}")
    return Choice(path, {}, why)
