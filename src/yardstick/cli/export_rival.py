"""Export a variant as compressed-tensors and write its manifest: the row that shows what integer zero points cost."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import sha256_file
from yardstick.manifest import write_rival
from yardstick.models.folder import open_original
from yardstick.provenance import code_digest, package_versions
from yardstick.rivals.export_folder import export_folder
from yardstick.sources.packed import PackedSource


def main(arguments) -> None:
    original, folder = open_original(arguments.model), arguments.output.parent / "files"
    exported = export_folder(PackedSource(arguments.checkpoint.parent), original.folder, folder)
    write_rival(
        arguments.output,
        arguments.record,
        folder,
        [path.name for path in folder.iterdir()],
        recipe=arguments.recipe,
        inputs={"model": original.digest, "checkpoint": sha256_file(arguments.checkpoint)},
        code=code_digest("yardstick.cli.export_rival"),
        versions=package_versions(),
        **exported,
    )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="index of the packed checkpoint")
    arguments.add_argument("--output", type=Path, required=True, help="manifest.json to write")
    arguments.add_argument("--record", type=Path, required=True, help="quantize.json to write")
    run_step(main, arguments)
