"""Progress on long steps: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

LINE_EVERY_SECONDS = 15.0


@contextmanager
def progress(what: str, total: int, unit: str = "token") -> Iterator[tqdm]:
    """A tqdm bar that shows rate and time left; its `update(n)` is called with finished units.

    On a terminal it redraws; in a log file or a pipe it prints one line at most every 15 seconds.
    """
    interactive = sys.stderr.isatty()
    bar = tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=True,
        file=sys.stderr,
        dynamic_ncols=interactive,
        mininterval=0.2 if interactive else LINE_EVERY_SECONDS,
        maxinterval=1.0 if interactive else LINE_EVERY_SECONDS,
        leave=interactive,
        bar_format=None if interactive else "{desc}: {percentage:3.0f}% {rate_fmt}, {remaining} left\n",
    )
    started = time.monotonic()
    try:
        yield bar
    finally:
        done = bar.n
        bar.close()
        elapsed = max(time.monotonic() - started, 1e-9)
        if done:
            print(f"{what}: {done} {unit}s in {elapsed:.1f} s ({done / elapsed:.0f} {unit}s/s)", file=sys.stderr)
