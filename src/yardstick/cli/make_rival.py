"""Make a rival of a model with its own tool, in the tool's environment, and write its manifest."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import sha256_file, write_json
from yardstick.manifest import write_manifest
from yardstick.models.folder import open_original
from yardstick.provenance import code_digest
from yardstick.rivals.tool import run_tool, tool_versions


def main(arguments) -> None:
    recipe, manifest, original = arguments.recipe, arguments.output, open_original(arguments.model)
    original.source.reader.check_all()
    environment, output = arguments.packages.parent, manifest.parent / "files"
    what = f"rival {arguments.name}"
    run_tool(what, environment, arguments.script, recipe, original.folder.resolve(), arguments.calibration, output)
    names = [path.name for path in output.iterdir() if path.is_file()]
    files = write_manifest(manifest, output, names, format=recipe["format"])
    inputs = {"model": original.digest, "script": sha256_file(arguments.script)}
    if arguments.calibration:
        inputs["calibration"] = sha256_file(arguments.calibration)
    write_json(
        arguments.record,
        {
            "recipe": recipe,
            "inputs": inputs,
            "files": files,
            "code_sha256": code_digest("yardstick.cli.make_rival"),
            "versions": tool_versions(environment),
        },
    )


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
