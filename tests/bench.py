"""`make bench`: what one evaluation costs, as ratios measured in this run, on the files of a finished default run.

- against the time that its matrix products need at this machine's fp32 rate (body, attention, both heads);
- against llama.cpp's forward on the same rival, per scored position. llama.cpp's perplexity tool scores the second half
  of each chunk; only its forward is timed, not its softmax and KL, so the ratio favours llama.cpp;
- the reference's space per position against llama.cpp's file of base log-probabilities.
"""

import sys
import time
from pathlib import Path

import torch

from tests.oracle.llama_cpp import timed_logits
from yardstick.corpora.load import load_windows
from yardstick.errors import YardstickError
from yardstick.evaluate.divergence import compare
from yardstick.evaluate.reference import load_states
from yardstick.models.folder import open_original
from yardstick.models.prefill import exact_arithmetic, final_hidden_states, head_rows
from yardstick.sources import open_source

MODEL, RIVAL = "smollm2-135m", "gguf-q4_k_m"
RESULTS = Path("results/quality") / MODEL


def matmul_rate(config, layers: int = 20) -> float:
    """fp32 operations per second of the products of some layers at 2048 positions, one after the other."""
    shapes = list(config.layer_linears(0).values())
    pairs = [(torch.randn(2048, columns), torch.randn(rows, columns)) for rows, columns in shapes]
    started = time.perf_counter()
    for _ in range(layers):
        for inputs, weights in pairs:
            inputs @ weights.T
    return layers * 2 * 2048 * sum(a * b for a, b in shapes) / (time.perf_counter() - started)


def operations(config, positions: int, length: int) -> tuple[int, int, int]:
    """Operations of the body's matrices, of its causal attention, and of both output heads."""
    layers = range(config.num_layers)
    linear = 2 * positions * sum(a * b for layer in layers for a, b in config.layer_linears(layer).values())
    # a position meets half of its chunk on average, in QK^T and in PV
    attention = 2 * positions * length * config.num_heads * config.head_dim * config.num_layers
    return linear, attention, 2 * 2 * positions * config.vocab_size * config.hidden_size


def main() -> None:
    exact_arithmetic()
    original = open_original(Path(f"data/models/{MODEL}/manifest.json"))
    config = original.config
    windows = load_windows(Path(f"data/quality/{MODEL}/chunks.npz"))
    reference = load_states(RESULTS / "reference/states.safetensors")
    path = RESULTS / RIVAL / "checkpoint/model.gguf"
    positions, length = windows.inputs.numel(), windows.inputs.shape[1]

    rates = [matmul_rate(config)]
    started = time.perf_counter()
    source = open_source(f"gguf:{path}")
    states = final_hidden_states(source, config, windows.inputs, torch.float32, 2)
    forward = time.perf_counter() - started
    head, own = head_rows(original.source, config), head_rows(source, config)
    started = time.perf_counter()
    compare(reference.flatten(0, 1), head, states.flatten(0, 1), own, windows.labels.flatten())
    comparison = time.perf_counter() - started
    rates.append(matmul_rate(config))
    rate, total = sum(rates) / 2, forward + comparison

    linear, attention, heads = operations(config, positions, length)
    print(f"one evaluation of {RIVAL}: forward {forward:.1f} s, comparison {comparison:.1f} s, {positions} positions")
    print(f"fp32 matrix products here: {rate / 1e9:.0f} GFLOP/s")
    for name, count in (("body, both heads", linear + heads), ("and attention", linear + heads + attention)):
        print(f"time / matmul time ({name}): {total / (count / rate):.2f}   (target 1.25 for body and heads)")

    half = length // 2
    seconds = [timed_logits(path, row.numpy(), half)[1] for row in windows.inputs[:3]]
    theirs, ours = min(seconds) / half, total / positions
    print(f"seconds per scored position / llama.cpp's forward: {ours / theirs:.2f}   ({ours:.2e} / {theirs:.2e})")
    # the perplexity tool's figure for this rival on an idle machine of this kind, its own KL included
    recorded = ours / (22.9 / 4088)
    print(f"... / llama.cpp's perplexity tool, recorded 22.9 s for 4088 positions: {recorded:.2f}   (target 0.6)")
    space = (RESULTS / "reference/states.safetensors").stat().st_size / positions
    base = 2 * (config.vocab_size + 4)  # uint16 log-probabilities, and 8 bytes of scale and offset
    print(f"reference bytes per position: {space:.0f}, llama.cpp's {base}: 1/{base / space:.1f}   (target 1/40)")


if __name__ == "__main__":
    try:
        main()
    except YardstickError as error:
        sys.exit(f"yardstick: {error}; run `make table` first")
