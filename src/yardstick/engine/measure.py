"""Times that can be believed: weights that no cache holds, medians of rounds, the machine's own bandwidth beside."""

import resource
import statistics
import time
from collections.abc import Callable, Sequence

import torch

ROUNDS, LONG_SECONDS = 7, 0.5
ROUND_SECONDS = {"cpu": 0.04, "cuda": 0.005}
# weights that are multiplied in turn must not fit into a cache: in a model each is read once a token
BEYOND_CACHE = {"cpu": 150e6, "cuda": 400e6}
MOST_COPIES = 1024
COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}


def seconds_each(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median time of one call in seconds, over rounds of all calls in turn; one round where that takes long."""
    for call in calls:
        call()
    once = _round(calls, 1, device)
    if once > LONG_SECONDS:
        return once / len(calls)
    repeats = max(1, int(ROUND_SECONDS[device.type] / max(once, 1e-9)))
    return statistics.median(_round(calls, repeats, device) for _ in range(ROUNDS)) / (repeats * len(calls))


def _round(calls: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            for call in calls:
                call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3
    started = time.perf_counter()
    for _ in range(repeats):
        for call in calls:
            call()
    return time.perf_counter() - started


def copies_beyond_cache(nbytes: int, device: torch.device) -> int:
    """How many weights of a size it takes to leave no cache of use."""
    return min(MOST_COPIES, max(1, -(-int(BEYOND_CACHE[device.type]) // nbytes)))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy within the device's memory."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_each([lambda: target.copy_(source)], device)


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes taken so far: of the device's memory, on the CPU by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
