"""Run the original over the first positions of every evaluation corpus and store what each of its matrices reads.

The file holds positions × (the widths of all stages' inputs) values in the evaluation's arithmetic: 256 positions of
a 135M model in fp32 take 102 MB, of a 27B model in bf16 about 1.1 GB. It is held in memory until it is written.
"""

from collections import Counter
from pathlib import Path

from safetensors.torch import save_file

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import load_windows
from yardstick.evaluate.probe_inputs import first_positions, stage_inputs
from yardstick.files import atomic_path, sha256_file
from yardstick.manifest import write_manifest
from yardstick.models.folder import open_original
from yardstick.models.prefill import DTYPES, exact_arithmetic
from yardstick.progress import progress

INPUTS = "probe.safetensors"


def main(arguments) -> None:
    exact_arithmetic()
    original, recipe = open_original(arguments.model), arguments.recipe
    windows = load_windows(arguments.chunks).without(recipe["own_texts"])
    taken = first_positions(windows.corpora, windows.inputs.shape[1], recipe["positions"])
    rows, counts = [row for row, _ in taken], [count for _, count in taken]
    ids = windows.inputs[rows, : max(counts)]
    stages, tensors, positions = {}, {}, Counter()
    for row, count in taken:
        positions[windows.corpora[row]] += count
    first = recipe["layers"] == "first"
    with progress("probe inputs", 1 if first else original.config.num_layers, unit="layer") as done:
        for names, inputs in stage_inputs(
            original.source, original.config, ids, counts, DTYPES[recipe["dtype"]], recipe["batch_chunks"], first
        ):
            tensors[names[0]], stages[names[0]] = inputs, names
            done(int(names[0].endswith("mlp.down_proj.weight")))  # a layer's last stage
    path = arguments.output.parent / INPUTS
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
    record = {"model": original.digest, "chunks": sha256_file(arguments.chunks), "recipe": recipe}
    write_manifest(arguments.output, path.parent, [INPUTS], stages=stages, positions=dict(positions), **record)


if __name__ == "__main__":
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--chunks", type=Path, required=True, help="evaluation windows")
    arguments.add_argument("--output", type=Path, required=True, help="manifest to write beside the inputs")
    run_step(main, arguments)
