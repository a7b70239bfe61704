"""`make bench`, second part: time against positions, and memory against layers, on synthetic checkpoints in shards.

The forward's time must grow with the positions and with nothing else; its memory must not grow with the layers.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from tests.large import peak_gigabytes, write_large_model
from yardstick.models.folder import open_folder
from yardstick.models.prefill import exact_arithmetic, final_hidden_states

SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPE |= {"vocab_size": 8192}


def main(chunks=(8, 16, 32, 64), layers=(4, 8, 16, 32), length: int = 256) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print_times(folder, chunks, layers[1], length)
        print_peaks(folder, layers, length)


def print_times(folder: Path, chunks, layers: int, length: int) -> None:
    """Seconds a position; the last column is 1 where time is linear."""
    exact_arithmetic()
    write_large_model(folder / "times", num_hidden_layers=layers, **SHAPE)
    original = open_folder(folder / "times")
    print("positions   seconds   microseconds a position   against the first")
    first = None
    for count in (chunks[0], *chunks):  # the first time is to warm up
        ids = torch.randint(0, SHAPE["vocab_size"], (count, length))
        started = time.perf_counter()
        final_hidden_states(original.source, original.config, ids, torch.float32, 2)
        elapsed = time.perf_counter() - started
        if first is None:
            first = 0.0
            continue
        each = elapsed / ids.numel()
        first = first or each
        print(f"{ids.numel():9d} {elapsed:9.2f} {1e6 * each:25.1f} {each / first:19.2f}")


def print_peaks(folder: Path, layers, length: int) -> None:
    """Peak resident memory of the reference step; flat where it does not depend on the number of layers."""
    np.savez(folder / "chunks.npz", text=np.zeros((2, length + 1), dtype=np.int32))
    (folder / "corpora.json").write_text(json.dumps({"vocabulary": SHAPE["vocab_size"]}))
    print("layers   checkpoint GB   peak GB")
    for count in layers:
        model = folder / f"layers-{count}"
        size = write_large_model(model, num_hidden_layers=count, **SHAPE)
        recipe = json.dumps({"kind": "local", "path": str(model)})
        manifest, files = f"{count}.json", ("--chunks", "chunks.npz", "--corpora", "corpora.json")
        peak_gigabytes(folder, "build_model", "--recipe", recipe, "--downloads", "x", "--output", manifest)
        settings = ("--recipe", '{"dtype": "float32", "batch_chunks": 2}', "--model", manifest)
        peak = peak_gigabytes(folder, "build_reference", *settings, *files, "--output", f"states-{count}.json")
        print(f"{count:6d} {size / 1e9:15.2f} {peak:9.2f}")


if __name__ == "__main__":
    sys.exit(main())
