"""Cut the evaluation chunks and calibration sequences of a model's tokenizer, and write their manifest."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from yardstick.cli.common import parser, run_step
from yardstick.corpora.manifest import build_windows, require_same
from yardstick.errors import YardstickError
from yardstick.files import atomic_path, write_json
from yardstick.models.folder import open_original


def main(arguments) -> None:
    original = open_original(arguments.model)
    folder, rows = original.folder, original.config.vocab_size
    chunks, sequences, manifest = build_windows(arguments.recipe, load_tokenizer(folder), arguments.downloads)
    highest = max(int(ids.max()) for ids in (*chunks.values(), *sequences.values()))
    if highest >= rows:
        raise YardstickError(f"{folder}: the tokenizer gives id {highest}, the model has {rows} rows")
    if arguments.pin:
        require_same(manifest, arguments.pin)
    write_arrays(arguments.chunks, chunks)
    write_arrays(arguments.calibration, sequences)
    write_json(arguments.manifest, manifest)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        YardstickError: tokenizer.json is damaged.
    """
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise YardstickError(f"{folder / 'tokenizer.json'}: damaged ({' '.join(str(error).split())[:120]})") from None


def write_arrays(target: Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic_path(target) as temporary, open(temporary, "wb") as stream:
        np.savez(stream, **arrays)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--pin", type=Path, help="manifest that the ids must agree with")
    arguments.add_argument("--downloads", type=Path, required=True, help="cache of downloaded archives")
    for output in ("chunks", "calibration", "manifest"):
        arguments.add_argument(f"--{output}", type=Path, required=True)
    run_step(main, arguments)
