"""Fetch a published rival, or point at one on this machine, and write its manifest: format, place, digests."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import sha256_file, write_json
from yardstick.provenance import code_digest, package_versions
from yardstick.sources import KINDS


def main(arguments) -> None:
    recipe, manifest = arguments.recipe, arguments.output
    if recipe["format"] not in KINDS:  # before gigabytes are fetched that nothing here can read
        readers = ", ".join(KINDS)
        raise YardstickError(
            f"rival {arguments.name}: there is no reader for the format {recipe['format']} (readers: {readers})"
        )
    if recipe["kind"] == "local":
        folder = Path(recipe["path"]).resolve()
        if not folder.exists():
            raise YardstickError(f"rival {arguments.name}: {recipe['path']}: no such file or folder")
        names = [path.name for path in sorted(folder.iterdir()) if path.is_file()] if folder.is_dir() else [folder.name]
        folder = folder if folder.is_dir() else folder.parent
    else:
        from yardstick.retrieve.hub import download

        folder = manifest.parent / "files"
        what = f"rival {arguments.name}"
        names = download(what, recipe["repository"], recipe["revision"], recipe["files"], folder, recipe.get("sha256"))
    files = {name: sha256_file(folder / name) for name in names}
    location = str(folder) if recipe["kind"] == "local" else folder.name
    write_json(manifest, {"folder": location, "files": files, "format": recipe["format"]})
    write_json(
        arguments.record,
        {
            "recipe": recipe,
            "inputs": files,
            "code_sha256": code_digest("yardstick.cli.retrieve_rival"),
            "versions": package_versions(),
        },
    )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the rival's name")
    arguments.add_argument("--output", type=Path, required=True, help="manifest.json to write")
    arguments.add_argument("--record", type=Path, required=True, help="quantize.json to write")
    run_step(main, arguments)
