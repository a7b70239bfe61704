"""Run one candidate over the evaluation chunks and compare it with the reference, position by position."""

import importlib
from pathlib import Path

import torch

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import EvaluationWindows, load_windows
from yardstick.errors import YardstickError
from yardstick.evaluate.bits import bits_per_weight, schemes, unquantized
from yardstick.evaluate.divergence import METRIC_VERSION, compare, find_fault, tile_count
from yardstick.evaluate.positions import positions_frame, write_positions
from yardstick.evaluate.reference import STATES, load_states
from yardstick.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from yardstick.manifest import checked_files
from yardstick.models.folder import Original, open_original
from yardstick.models.prefill import (
    DTYPES,
    exact_arithmetic,
    expected_tensors,
    final_hidden_states,
    head_rows,
    pick_device,
)
from yardstick.progress import progress
from yardstick.provenance import code_digest, machine, package_versions
from yardstick.sources import KINDS, TensorSource, audit_source
from yardstick.sources.candidate import open_candidate

# imported by name, so that an edit of it reruns that noise floor and nothing else
HUGGING_FACE = "yardstick.evaluate.hugging_face"


def main(arguments) -> None:
    exact_arithmetic()
    recipe, original = arguments.recipe["evaluate"], open_original(arguments.model)
    config, source = original.config, open_candidate(recipe["source"], arguments.checkpoint, original)
    vocabulary = read_json(arguments.corpora, "vocabulary")["vocabulary"]
    audit_source(source, expected_tensors(config, source))
    windows = load_windows(arguments.chunks)
    folder, reference_files = checked_files(arguments.reference)
    reference = load_states(folder / STATES)
    if tuple(reference.shape[:2]) != tuple(windows.inputs.shape):
        raise YardstickError(f"{arguments.reference}: is not the reference of {arguments.chunks}")
    with progress(f"forward {arguments.name}", windows.inputs.numel(), passes=config.num_layers) as done:
        states = run_forward(recipe, source, original, windows, done)
    with progress(f"compare {arguments.name}", windows.inputs.numel(), passes=tile_count(vocabulary)) as done:
        divergence = compare(
            reference.flatten(0, 1),
            head_rows(original.source, config),
            states.flatten(0, 1),
            head_rows(source, config),
            windows.labels.flatten(),
            vocabulary,
            done,
        )
    length = windows.inputs.shape[1]
    fault = find_fault(divergence)
    write_positions(arguments.positions, positions_frame(divergence, windows.corpora, length))
    modules = ["yardstick.cli.evaluate", KINDS[recipe["source"]][0]]
    if recipe["forward"] == "transformers":
        modules.append(HUGGING_FACE)
    write_json(
        arguments.output,
        {
            "model": arguments.recipe["model"],
            "candidate": arguments.name,
            "failed": fault and describe(fault, windows, length),
            "bits_per_weight": bits_per_weight(source, config),
            "schemes": schemes(source, config),
            "unquantized": unquantized(source, config),
            "vocabulary": vocabulary,
            "recipe": arguments.recipe,
            "provenance": {
                "recipe_sha256": sha256_text(canonical_json(arguments.recipe)),
                "inputs": {
                    "model": original.digest,
                    "chunks": sha256_file(arguments.chunks),
                    "reference": reference_files[STATES],
                    **({"checkpoint": sha256_file(arguments.checkpoint)} if arguments.checkpoint else {}),
                },
                "code_sha256": code_digest(*modules),
                "metric_version": METRIC_VERSION,
                "versions": package_versions(),
                "machine": machine(),
                "device": str(pick_device()),
                "dtype": recipe["dtype"],
            },
        },
    )


def run_forward(
    recipe: dict, source: TensorSource, original: Original, windows: EvaluationWindows, on_tokens
) -> torch.Tensor:
    """Final hidden states of the candidate, by our forward or by Hugging Face's."""
    dtype, config = DTYPES[recipe["dtype"]], original.config
    if recipe["forward"] == "transformers":
        original.source.reader.check_all()
        hugging_face = importlib.import_module(HUGGING_FACE)
        # counted once per layer, like ours, so that both bars have one unit
        return hugging_face.final_hidden_states(
            original.folder, windows.inputs, dtype, lambda tokens: on_tokens(tokens * config.num_layers)
        )
    return final_hidden_states(
        source, config, windows.inputs, dtype, recipe["batch_chunks"], on_tokens, recipe.get("decode_from")
    )


def describe(fault: tuple[int, str], windows: EvaluationWindows, length: int) -> str:
    """Where a failed candidate first went wrong."""
    chunk, position = divmod(fault[0], length)
    return f"{fault[1]}, first at corpus {windows.corpora[chunk]} chunk {chunk} position {position}"


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the candidate's name")
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--checkpoint", type=Path, help="the candidate's file or index; the original if left out")
    arguments.add_argument("--chunks", type=Path, required=True, help="evaluation windows")
    arguments.add_argument("--corpora", type=Path, required=True, help="the corpora's manifest.json")
    arguments.add_argument("--reference", type=Path, required=True, help="manifest.json of the reference")
    arguments.add_argument("--positions", type=Path, required=True, help="positions.parquet to write")
    arguments.add_argument("--output", type=Path, required=True, help="evaluation.json to write")
    run_step(main, arguments)
