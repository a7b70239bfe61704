"""Make a rival of a model with its own tool, in the tool's environment, and write its manifest."""

import tempfile
from pathlib import Path

import numpy as np

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import load_calibration
from yardstick.errors import YardstickError
from yardstick.files import sha256_file
from yardstick.manifest import write_rival
from yardstick.models.folder import open_original
from yardstick.provenance import code_digest
from yardstick.rivals.tool import run_tool, tool_versions


def main(arguments) -> None:
    recipe, manifest, original = arguments.recipe, arguments.output, open_original(arguments.model)
    original.source.reader.check_all()
    environment, output = arguments.packages.parent, manifest.parent / "files"
    what, folder = f"rival {arguments.name}", original.folder.resolve()
    inputs = {"model": original.digest, "script": sha256_file(arguments.script)}
    if arguments.calibration:
        inputs["calibration"] = sha256_file(arguments.calibration)
    with tempfile.TemporaryDirectory() as scratch:
        ids = None
        if arguments.calibration:
            ids = Path(scratch) / "ids.npy"
            np.save(ids, picked(arguments.calibration, recipe["sequences"], what))
        run_tool(what, environment, arguments.script, recipe, folder, ids, output)
    write_rival(
        manifest,
        arguments.record,
        output,
        [path.name for path in output.iterdir() if path.is_file()],
        recipe=recipe,
        inputs=inputs,
        code=code_digest("yardstick.cli.make_rival"),
        versions=tool_versions(environment),
    )


def picked(calibration: Path, count: int, what: str) -> np.ndarray:
    """int64 ids [count, length]: calibration sequences at equal distances, so that every text has its share.

    Raises:
        YardstickError: there are fewer.
    """
    rows = load_calibration(calibration)
    if count > len(rows):
        raise YardstickError(f"{what}: asks for {count} calibration sequences, {calibration} holds {len(rows)}")
    return rows.numpy()[np.linspace(0, len(rows) - 1, count).astype(int)].astype(np.int64)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the rival's name")
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--calibration", type=Path, help="calibration sequences, where the scheme uses them")
    arguments.add_argument("--packages", type=Path, required=True, help="packages.json of the tool's environment")
    arguments.add_argument("--script", type=Path, required=True, help="make.py of the tool")
    arguments.add_argument("--output", type=Path, required=True, help="manifest.json to write")
    arguments.add_argument("--record", type=Path, required=True, help="quantize.json to write")
    run_step(main, arguments)
