"""Progress on long steps: a bar on a terminal, a line now and then in a pipe or a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

LINE_EVERY_SECONDS = 20.0


class _Lines:
    """The part of tqdm that we use, as plain lines."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.n, self._what, self._total, self._unit = 0.0, what, total, unit
        self._started = self._last = time.monotonic()

    def update(self, count: float) -> None:
        self.n += count
        now = time.monotonic()
        if now - self._last < LINE_EVERY_SECONDS or not self.n:
            return
        self._last = now
        rate = self.n / (now - self._started)
        left = (self._total - self.n) / rate
        done, speed = f"{self.n / self._total:.0%}", f"{_rate(rate)} {self._unit}s/s"
        print(f"{self._what}: {done}, {speed}, {left:.0f} s left", file=sys.stderr)

    def close(self) -> None:
        pass


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


@contextmanager
def progress(what: str, total: int, unit: str = "token", passes: int = 1) -> Iterator[Callable[[int], None]]:
    """Gives a function to be called with the units finished; shows their rate and the time left.

    Where every unit is passed over several times (a token goes through each layer), `passes` says how often.
    """
    if sys.stderr.isatty():
        bar = tqdm(total=total, desc=what, unit=unit, unit_scale=True, file=sys.stderr, dynamic_ncols=True, leave=False)
    else:
        bar = _Lines(what, total, unit)
    started = time.monotonic()
    try:
        yield lambda count: bar.update(count / passes)
    finally:
        bar.close()
        elapsed = max(time.monotonic() - started, 1e-9)
        if bar.n:
            print(
                f"{what}: {bar.n:.0f} {unit}s in {elapsed:.1f} s ({_rate(bar.n / elapsed)} {unit}s/s)", file=sys.stderr
            )
