"""Viterbi's search through a bit-shift trellis, in C: numpy and torch take ten times as long over the same operations
and their calls (docs/log.md).

It is compiled where it runs, once a process, with the C compiler of the machine. Every value is made by one rounding
after the other, in an order of its own, so results depend neither on the compiler nor on the width of vectors.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from yardstick.errors import YardstickError

# With B values a symbol, a state is (top, low, symbol), most significant first; the symbol before it left (low, symbol)
# as (top, low). So the B states that differ in `top` alone lead to the same ones. Of each step only the least cost of
# the ways to each (top, low) is kept, and the way back is chosen from these.
SOURCE = r"""
#include <math.h>

/* what belongs to the BRANCHES symbols of a step, at once */
typedef float row __attribute__((vector_size(4 * BRANCHES), aligned(4), may_alias));
typedef int mask __attribute__((vector_size(4 * BRANCHES)));

static inline float cost(float least, float value, float target)
{
    float difference = value - target;
    return least + difference * difference;
}

static void search(const float *restrict targets, long steps, const float *restrict values, long lows,
                   float *restrict least, unsigned char *restrict symbols)
{
    const long rests = lows * BRANCHES, states = rests * BRANCHES;
    for (long rest = 0; rest < rests; rest++)
        least[rest] = rest ? INFINITY : 0;
    for (long step = 0; step + 1 < steps; step++) {
        const float *from = least + step * rests, target = targets[step];
        float *to = least + (step + 1) * rests;
        for (long low = 0; low < lows; low++, to += BRANCHES) {
            row best = (row){0} + INFINITY;
            for (int top = 0; top < BRANCHES; top++) {
                const row difference = *(const row *)(values + (top * lows + low) * BRANCHES) - target;
                const row found = from[top * lows + low] + difference * difference;
                const mask better = found < best;
                best = (row)((better & (mask)found) | (~better & (mask)best));
            }
            *(row *)to = best;
        }
    }
    const float *from = least + (steps - 1) * rests;
    long state = 0;
    float best = INFINITY;
    for (long other = 0; other < states; other++) {
        const float found = cost(from[other / BRANCHES], values[other], targets[steps - 1]);
        if (found < best) {
            best = found;
            state = other;
        }
    }
    for (long step = steps - 1; step > 0; step--) {
        const long rest = state / BRANCHES;
        symbols[step] = state % BRANCHES;
        from = least + (step - 1) * rests;
        best = INFINITY;
        for (int top = 0; top < BRANCHES; top++) {
            const float found =
                cost(from[top * lows + rest / BRANCHES], values[top * rests + rest], targets[step - 1]);
            if (found < best) {
                best = found;
                state = top * rests + rest;
            }
        }
    }
    symbols[0] = state % BRANCHES;
}

void viterbi(const float *targets, long count, long steps, const float *values, long lows, float *least,
             unsigned char *symbols)
{
    for (long i = 0; i < count; i++)
        search(targets + i * steps, steps, values, lows, least, symbols + i * steps);
}
"""
OPTIONS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")


@functools.cache
def compiled(branches: int) -> ctypes.CDLL:
    """The search for that many values a symbol: with their number known, a loop over them is an operation or two.

    Raises:
        YardstickError: there is no C compiler, or it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise YardstickError("trellis codes are searched in C, and there is no C compiler: install gcc")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "viterbi.c", Path(folder) / "viterbi.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [compiler, *OPTIONS, f"-DBRANCHES={branches}", str(source), "-o", str(library)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise YardstickError(f"trellis codes are searched in C, and {compiler} fails: {result.stderr[-300:]}")
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:  # a temporary folder that nothing may be run from
            raise YardstickError(f"trellis codes are searched in C, which cannot be loaded ({error})") from None


def viterbi(targets: torch.Tensor, values: torch.Tensor, symbol_bits: int = 4) -> torch.Tensor:
    """The symbols whose values are nearest, in sum of squares over a sequence, to fp32 targets [sequences, steps].

    A state is the last bits of the symbols up to it, as many as `values`, one for each state, are numbered by; the
    search starts in state 0 (Viterbi 1967). Of equal ways the one of the smaller states is taken. Sequences are shared
    out to as many threads as torch has.

    Returns:
        uint8 [sequences, steps].
    """
    count, steps = targets.shape
    branches = 1 << symbol_bits
    of_states = np.ascontiguousarray(values.float().cpu().numpy())
    wanted = np.ascontiguousarray(targets.float().cpu().numpy())
    symbols, search = np.empty((count, steps), dtype=np.uint8), compiled(branches).viterbi
    threads = max(1, min(torch.get_num_threads(), count))

    def part(i: int) -> None:
        first, last = count * i // threads, count * (i + 1) // threads
        least = np.empty(steps * (len(of_states) // branches), dtype=np.float32)
        search(
            pointer(wanted[first:]),
            ctypes.c_long(last - first),
            ctypes.c_long(steps),
            pointer(of_states),
            ctypes.c_long(len(of_states) // branches**2),
            pointer(least),
            pointer(symbols[first:]),
        )

    if threads == 1:
        part(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(threads)))
    return torch.from_numpy(symbols).to(targets.device)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
