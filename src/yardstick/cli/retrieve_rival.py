"""Fetch a published rival, or point at one on this machine, check that it is one, and write its manifest."""

import shutil
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.formats import DECODED_BY
from yardstick.manifest import candidate_path, write_rival
from yardstick.models.folder import open_original
from yardstick.models.prefill import expected_tensors
from yardstick.provenance import code_digest, package_versions
from yardstick.sources import KINDS, audit_source, open_source


def main(arguments) -> None:
    recipe, manifest, what = arguments.recipe, arguments.output, f"rival {arguments.name}"
    original = open_original(arguments.model)
    if recipe["kind"] == "local":
        folder, names = local_files(Path(recipe["path"]).resolve(), what)
    else:
        folder, names = fetched_files(recipe, manifest.parent / "files", arguments.downloads, what)
    modules = ["yardstick.cli.retrieve_rival"]
    if recipe["format"] not in DECODED_BY:  # such a one is checked when its weights have been spelled out
        path = candidate_path(recipe["format"], folder, list(names))
        source = open_source(f"{recipe['format']}:{path}", original.config, original.source)
        audit_source(source, expected_tensors(original.config, source))
        modules.append(KINDS[recipe["format"]][0])
    write_rival(
        manifest,
        arguments.record,
        folder,
        names,
        recipe=recipe,
        inputs={"model": original.digest},
        code=code_digest(*modules),
        versions=package_versions(),
    )


def fetched_files(recipe: dict, folder: Path, downloads: Path, what: str) -> tuple[Path, dict[str, str]]:
    """Folder and digests of the files of a rival on the hub.

    They are collected in `downloads` and moved when they are whole: what an interrupted step had begun of its own
    outputs is deleted before the next, and a download should go on instead.
    """
    from yardstick.retrieve.hub import download

    repository, revision = recipe["repository"], recipe["revision"]
    waiting = downloads / "hub" / f"{repository.replace('/', '--')}@{revision[:12]}"
    digests = download(what, repository, revision, recipe["files"], waiting, recipe.get("sha256"))
    for name in digests:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(waiting / name, folder / name)
    return folder, digests


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
    arguments.add_argument("--downloads", type=Path, required=True, help="where downloads wait until they are whole")
    arguments.add_argument("--output", type=Path, required=True, help="manifest.json to write")
    arguments.add_argument("--record", type=Path, required=True, help="quantize.json to write")
    run_step(main, arguments)
