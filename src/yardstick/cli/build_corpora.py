"""Cut the evaluation chunks and calibration sequences of a model's tokenizer, and write their manifest."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import load_arrays, write_arrays
from yardstick.corpora.manifest import build_windows, require_same
from yardstick.errors import YardstickError
from yardstick.files import write_json
from yardstick.models.folder import load_tokenizer, open_original


def main(arguments) -> None:
    original = open_original(arguments.model)
    folder, rows = original.folder, original.config.vocab_size
    written = load_arrays(arguments.generated) if arguments.generated else {}
    tokenizer = load_tokenizer(folder)
    chunks, sequences, manifest = build_windows(arguments.recipe, tokenizer, arguments.downloads, written)
    highest = max(int(ids.max()) for ids in (*chunks.values(), *sequences.values()))
    if highest >= rows:
        raise YardstickError(f"{folder}: the tokenizer gives id {highest}, the model has {rows} rows")
    if arguments.pin:
        require_same(manifest, arguments.pin)
    write_arrays(arguments.chunks, chunks)
    write_arrays(arguments.calibration, sequences)
    write_json(arguments.manifest, manifest)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--pin", type=Path, help="manifest that the ids must agree with")
    arguments.add_argument("--downloads", type=Path, required=True, help="cache of downloaded archives")
    arguments.add_argument("--generated", type=Path, help="windows that the model itself wrote")
    for output in ("chunks", "calibration", "manifest"):
        arguments.add_argument(f"--{output}", type=Path, required=True)
    run_step(main, arguments)
