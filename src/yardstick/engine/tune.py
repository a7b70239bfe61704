"""Which tile is fastest: the sweep that `tuned.py` is made from.

Every tile of `TILES` is timed for a shape, a number of rows and a type of inputs on weights that no cache holds; the
fastest path and tile are the entry of the table. A tile that the device refuses (too much shared memory, say) is left
out. `bench/gpu_check.py` runs it on a card and prints the entries.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from yardstick.engine.choose import Entry
from yardstick.engine.measure import LONG_SECONDS, copies_beyond_cache, seconds_each
from yardstick.engine.paths import PATHS, open_path
from yardstick.engine.weight import PackedWeight

# settings that are tried, by path; one with none has no tile
TILES: dict[str, dict[str, tuple[int, ...]]] = {
    "triton-gemv": {"rows": (8, 16, 32), "groups": (1, 2), "splits": (1, 2, 4), "warps": (4, 8)},
    "triton-gemm": {"batch": (16, 32, 64), "rows": (32, 64, 128), "splits": (1, 2, 4), "warps": (4, 8), "stages": (3,)},
    "triton-shuffled": {
        "batch": (16, 32, 64),
        "rows": (32, 64, 128),
        "splits": (1, 2, 4),
        "warps": (4, 8),
        "stages": (3,),
    },
}
LEAST_BATCH = 16  # rows of inputs in a tensor core's product


def tiles(path: str, rows: int) -> Iterator[dict[str, int]]:
    """Tiles of a path that are worth a try for a number of rows: their batch is the least that holds the rows."""
    settings = TILES.get(path, {})
    for values in itertools.product(*settings.values()):
        tile = dict(zip(settings, values, strict=True))
        if "batch" not in tile or tile["batch"] == max(LEAST_BATCH, 1 << (rows - 1).bit_length()):
            yield tile


def path_seconds(
    name: str, weights: Sequence[PackedWeight], x: torch.Tensor, tile: dict[str, int]
) -> tuple[float, int]:
    """Seconds of one product by a path, over weights of one shape in turn, and the bytes of weights that it reads."""
    opened = [open_path(name, weights[0], x.dtype, tile)]
    alone = seconds_each([partial(opened[0], x)], x.device)
    # of a slow path a few copies take longer than a cache could hide
    copies = min(copies_beyond_cache(opened[0].nbytes, x.device), max(1, int(LONG_SECONDS / alone)))
    opened += [open_path(name, weight, x.dtype, tile) for weight in weights[1:copies]]
    return seconds_each([partial(call, x) for call in opened], x.device), opened[0].nbytes


def sweep(weights: Sequence[PackedWeight], x: torch.Tensor, paths: Sequence[str] | None = None) -> list[Entry]:
    """Entries of all paths and tiles that work, the fastest first.

    Args:
        weights: of one shape, enough of them to fill more than a cache (`measure.copies_beyond_cache`).
        x: inputs [rows, in].
        paths: names of `PATHS`; all if left out.
    """
    first, found = weights[0], []
    for name in paths or PATHS:
        if len(x) not in PATHS[name].rows or PATHS[name].refusal(first, x.device):
            continue
        for tile in tiles(name, len(x)):
            try:
                seconds, _ = path_seconds(name, weights, x, tile)
            except RuntimeError:  # what Triton raises for a tile that the device has no room for
                continue
            shape = (first.out_features, first.in_features, first.group_size)
            found.append(Entry(str(x.dtype).removeprefix("torch."), *shape, len(x), name, tile, 1e6 * seconds))
    return sorted(found, key=lambda entry: entry.microseconds)
