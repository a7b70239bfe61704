"""Fetch a published rival, or point at one on this machine, check that it is one, and write its manifest."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import write_json
from yardstick.manifest import candidate_path, write_manifest
from yardstick.models.folder import open_original
from yardstick.models.prefill import expected_tensors
from yardstick.provenance import code_digest, package_versions
from yardstick.sources import KINDS, audit_source, open_source


def main(arguments) -> None:
    recipe, manifest, what = arguments.recipe, arguments.output, f"rival {arguments.name}"
    if recipe["kind"] == "local":
        folder, names = local_files(Path(recipe["path"]).resolve(), what)
    else:
        from yardstick.retrieve.hub import download

        folder = manifest.parent / "files"
        names = download(what, recipe["repository"], recipe["revision"], recipe["files"], folder, recipe.get("sha256"))
    original = open_original(arguments.model)
    path = candidate_path(recipe["format"], folder, names)
    source = open_source(f"{recipe['format']}:{path}", original.config.prefix)
    audit_source(source, expected_tensors(original.config, source))
    files = write_manifest(manifest, folder, names, format=recipe["format"])
    write_json(
        arguments.record,
        {
            "recipe": recipe,
            "inputs": {"model": original.digest},
            "files": files,
            "code_sha256": code_digest("yardstick.cli.retrieve_rival", KINDS[recipe["format"]][0]),
            "versions": package_versions(),
        },
    )


def local_files(path: Path, what: str) -> tuple[Path, list[str]]:
    """Folder and names of the files of a rival on this machine: one file, or all of a folder.

    Raises:
        YardstickError: there is nothing.
    """
    if path.is_file():
        return path.parent, [path.name]
    names = [file.name for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    if not names:
        raise YardstickError(f"{what}: {path}: {'holds no files' if path.is_dir() else 'no such file or folder'}")
    return path, names


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the rival's name")
    arguments.add_argument("--model", type=Path, required=True, help="manifest.json of the model it is a rival of")
    arguments.add_argument("--output", type=Path, required=True, help="manifest.json to write")
    arguments.add_argument("--record", type=Path, required=True, help="quantize.json to write")
    run_step(main, arguments)
