"""Let the original model write the texts that are measured beside those of other people."""

from pathlib import Path

import numpy as np

from yardstick.cli.common import parser, run_step
from yardstick.corpora.generated import sample_windows
from yardstick.corpora.load import write_arrays
from yardstick.models.folder import load_tokenizer, open_original, start_id, vocabulary_size
from yardstick.models.generate import Model
from yardstick.models.prefill import DTYPES, exact_arithmetic
from yardstick.progress import progress


def main(arguments) -> None:
    exact_arithmetic()
    recipe, original = arguments.recipe, open_original(arguments.model)
    tokenizer = load_tokenizer(original.folder)
    model = Model(original.source, original.config, DTYPES[recipe["dtype"]], vocabulary_size(tokenizer))
    arrays: dict[str, np.ndarray] = {}
    total = sum(corpus["chunks"] for corpus in recipe["texts"].values()) * recipe["length"]
    with progress("own text", total) as done:
        for name, corpus in recipe["texts"].items():
            start = [start_id(original.folder)]
            if corpus["start"] is not None:
                start = tokenizer.encode(corpus["start"], add_special_tokens=False).ids
            arrays[name] = sample_windows(model, start, corpus["chunks"], recipe["length"], corpus["seed"], done)
    write_arrays(arguments.output, arrays)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--output", type=Path, required=True, help="generated.npz to write")
    run_step(main, arguments)
