"""Tell one candidate's loss apart: KL from the original when single matrices, kinds and layers are the candidate's."""

from collections import Counter
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import load_windows
from yardstick.evaluate.attribution import (
    DTYPE,
    additivity,
    branch_states,
    choose_positions,
    compare_branches,
    describe_branches,
    find_failure,
    find_modules,
    make_branches,
)
from yardstick.evaluate.candidate import open_candidate, proof
from yardstick.evaluate.divergence import tile_count
from yardstick.files import read_json, sha256_file, write_json
from yardstick.models.folder import open_original
from yardstick.models.prefill import exact_arithmetic, expected_tensors
from yardstick.progress import progress
from yardstick.sources import KINDS, audit_source


def main(arguments) -> None:
    exact_arithmetic()
    recipe, original = arguments.recipe, open_original(arguments.model)
    config, source = original.config, open_candidate(recipe["source"], arguments.checkpoint, original)
    audit_source(source, expected_tensors(config, source))
    vocabulary = read_json(arguments.corpora, "vocabulary")["vocabulary"]
    windows = load_windows(arguments.chunks).without(recipe["own_texts"])
    input_ids, labels, corpora = choose_positions(windows, recipe["positions"])
    branches = make_branches(find_modules(source, original.source, config), recipe["by"])
    most = len(branches) * input_ids.numel()  # branches that share their states take less
    with progress(f"swap {arguments.name}", most, passes=config.num_layers) as done:
        states, place = branch_states(source, original.source, config, input_ids, branches, done)
    with progress(f"compare {arguments.name}", most, passes=tile_count(vocabulary)) as done:
        divergences = compare_branches(
            source, original.source, config, states, place, branches, labels, vocabulary, done
        )
    failed = find_failure(branches, divergences)
    entries = [] if failed else list(describe_branches(branches, divergences, source))
    inputs = {
        "model": original.digest,
        "chunks": sha256_file(arguments.chunks),
        "checkpoint": sha256_file(arguments.checkpoint),
    }
    modules = ["yardstick.cli.attribute", KINDS[recipe["source"]][0]]
    write_json(
        arguments.output,
        {
            "model": recipe["model"],
            "candidate": arguments.name,
            "failed": failed,
            "positions": {
                "rows": len(input_ids),
                "length": input_ids.shape[1],
                "corpora": {name: count * input_ids.shape[1] for name, count in Counter(corpora).items()},
            },
            "branches": entries,
            "additivity": additivity(entries) if entries else None,
            "vocabulary": vocabulary,
            "recipe": recipe,
            "provenance": proof(recipe, inputs, modules, str(DTYPE).removeprefix("torch.")),
        },
    )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the candidate's name")
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="the candidate's file or index")
    arguments.add_argument("--chunks", type=Path, required=True, help="evaluation windows")
    arguments.add_argument("--corpora", type=Path, required=True, help="the corpora's manifest.json")
    arguments.add_argument("--output", type=Path, required=True, help="attribution.json to write")
    run_step(main, arguments)
