"""Make a GGUF rival of a model with ggml's own quantizers."""

import os
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import sha256_file
from yardstick.manifest import write_rival
from yardstick.models.folder import open_original
from yardstick.progress import progress
from yardstick.provenance import code_digest, package_versions
from yardstick.rivals.gguf_write import write_gguf
from yardstick.rivals.imatrix import read_imatrix
from yardstick.sources.gguf import gguf_name


def main(arguments) -> None:
    recipe, original = arguments.recipe, open_original(arguments.model)
    config = original.config
    importance = read_imatrix(arguments.imatrix) if arguments.imatrix else None
    if importance:
        check_widths(importance, config, arguments.imatrix)
    threads = len(os.sched_getaffinity(0))  # rows are shared among them; the result does not change
    total = sum(shape[0] * shape[1] for shape in config.tensors().values() if len(shape) == 2)
    with progress(f"gguf {recipe['mix']}", total, "weight") as done:
        types = write_gguf(arguments.output, original, recipe["mix"], importance, threads, done)
    write_rival(
        arguments.manifest,
        arguments.record,
        arguments.output.parent,
        [arguments.output.name],
        recipe=recipe,
        inputs={"model": original.digest} | ({"imatrix": sha256_file(arguments.imatrix)} if importance else {}),
        code=code_digest("yardstick.cli.build_gguf"),
        versions=package_versions(),
        types=types,
    )


def check_widths(importance, config, path: Path) -> None:
    """Refuse an importance matrix of another model.

    Raises:
        YardstickError: a matrix is missing or has another width.
    """
    shapes = config.tensors()
    for name in config.body_matrices():
        width = shapes[name][1]
        found = importance.get(gguf_name(name))
        if found is None or found.shape != (width,):
            raise YardstickError(
                f"{path}: {gguf_name(name)} is missing or not {width} wide; it belongs to another model"
            )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--imatrix", type=Path, help="importance matrix, where the recipe uses one")
    arguments.add_argument("--output", type=Path, required=True, help="GGUF file to write")
    arguments.add_argument("--manifest", type=Path, required=True, help="manifest.json to write beside it")
    arguments.add_argument("--record", type=Path, required=True, help="quantize.json to write")
    run_step(main, arguments)
