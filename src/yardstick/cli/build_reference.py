"""Run the original model over the evaluation chunks and store its final hidden states."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import load_windows
from yardstick.evaluate.reference import STATES, check_replay, require_finite_states, save_states
from yardstick.files import read_json
from yardstick.manifest import write_manifest
from yardstick.models.folder import open_original
from yardstick.models.prefill import DTYPES, exact_arithmetic, final_hidden_states, head_rows
from yardstick.progress import progress


def main(arguments) -> None:
    exact_arithmetic()
    original, windows, recipe = open_original(arguments.model), load_windows(arguments.chunks), arguments.recipe
    config, source = original.config, original.source
    with progress("reference", windows.inputs.numel(), passes=config.num_layers) as done:
        states = final_hidden_states(
            source, config, windows.inputs, DTYPES[recipe["dtype"]], recipe["batch_chunks"], done
        )
    require_finite_states(states)
    path = arguments.output.parent / STATES
    save_states(path, states, {"model": original.digest, "dtype": recipe["dtype"]})
    first_of_corpus = [windows.corpora.index(name) for name in dict.fromkeys(windows.corpora)]
    vocabulary = read_json(arguments.corpora, "vocabulary")["vocabulary"]
    check_replay(path, states, head_rows(source, config), windows.labels, first_of_corpus, vocabulary)
    write_manifest(arguments.output, path.parent, [STATES])


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--chunks", type=Path, required=True, help="evaluation windows")
    arguments.add_argument("--corpora", type=Path, required=True, help="the corpora's manifest.json")
    arguments.add_argument("--output", type=Path, required=True, help="manifest.json to write beside the states")
    run_step(main, arguments)
