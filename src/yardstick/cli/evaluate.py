"""Run one candidate over the evaluation chunks and compare it with the reference, position by position."""

import importlib
from pathlib import Path

import torch

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import EvaluationWindows, load_windows
from yardstick.engine import PACKED_MODEL
from yardstick.errors import YardstickError
from yardstick.evaluate.bits import bits_per_weight, schemes, unquantized
from yardstick.evaluate.candidate import open_candidate, proof
from yardstick.evaluate.divergence import compare, find_fault, tile_count
from yardstick.evaluate.positions import positions_frame, write_positions
from yardstick.evaluate.reference import STATES, load_states
from yardstick.files import read_json, sha256_file, write_json
from yardstick.manifest import checked_files
from yardstick.models.folder import Original, open_original
from yardstick.models.prefill import (
    DTYPES,
    exact_arithmetic,
    expected_tensors,
    final_hidden_states,
    head_rows,
    load_layer,
)
from yardstick.progress import progress
from yardstick.sources import KINDS, TensorSource, audit_source

# imported by name, so that an edit reruns the noise floor, or the rows of mixed parts, and nothing else
HUGGING_FACE, MIXED = "yardstick.evaluate.hugging_face", "yardstick.sources.mixed"


def main(arguments) -> None:
    exact_arithmetic()
    recipe, original = arguments.recipe["evaluate"], open_original(arguments.model)
    config, source = original.config, open_candidate(recipe["source"], arguments.checkpoint, original)
    modules = ["yardstick.cli.evaluate", KINDS[recipe["source"]][0]]
    inputs = {"checkpoint": sha256_file(arguments.checkpoint)} if arguments.checkpoint else {}
    if arguments.keep_bf16 or arguments.head_from:
        source, more_modules, head = mix(source, original, arguments)
        modules, inputs = modules + more_modules, inputs | head
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
    if recipe["forward"] == "transformers":
        modules.append(HUGGING_FACE)
    if recipe.get("weights") == "packed":
        modules.append(PACKED_MODEL)
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
            "provenance": proof(
                arguments.recipe,
                {
                    "model": original.digest,
                    "chunks": sha256_file(arguments.chunks),
                    "reference": reference_files[STATES],
                    **inputs,
                },
                modules,
                recipe["dtype"],
            ),
        },
    )


def mix(source: TensorSource, original: Original, arguments) -> tuple[TensorSource, list[str], dict[str, str]]:
    """The candidate with the parts that are asked for from elsewhere; also the code and the files that this takes.

    Raises:
        YardstickError: there is no candidate to mix, or what it is to be mixed with is of no known kind.
    """
    if arguments.checkpoint is None:
        raise YardstickError("--keep-bf16 and --head-from change a candidate; name it with --checkpoint")
    head, modules, inputs = None, [MIXED], {}
    if arguments.head_from:
        kind, _, path = arguments.head_from.partition(":")
        head = open_candidate(kind, Path(path), original)
        modules.append(KINDS[kind][0])
        inputs["head"] = sha256_file(Path(path))
    mixed = importlib.import_module(MIXED)
    try:
        source = mixed.MixedSource(source, original.source, original.config, arguments.keep_bf16, head)
    except YardstickError as error:
        raise YardstickError(f"{arguments.name}: {error}") from None
    return source, modules, inputs


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
    load = importlib.import_module(PACKED_MODEL).load_layer if recipe.get("weights") == "packed" else load_layer
    return final_hidden_states(
        source, config, windows.inputs, dtype, recipe["batch_chunks"], on_tokens, recipe.get("decode_from"), load
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
    arguments.add_argument("--keep-bf16", help="regular expression: matrices whose name it finds are the original's")
    arguments.add_argument("--head-from", help="KIND:PATH of another candidate, whose output head is taken")
    arguments.add_argument("--chunks", type=Path, required=True, help="evaluation windows")
    arguments.add_argument("--corpora", type=Path, required=True, help="the corpora's manifest.json")
    arguments.add_argument("--reference", type=Path, required=True, help="manifest.json of the reference")
    arguments.add_argument("--positions", type=Path, required=True, help="positions.parquet to write")
    arguments.add_argument("--output", type=Path, required=True, help="evaluation.json to write")
    run_step(main, arguments)
