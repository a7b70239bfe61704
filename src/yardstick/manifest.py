"""A manifest beside files that a later step reads: what they are, where they lie, and the digest of each."""

from collections.abc import Iterable
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import read_json, sha256_file, write_json


def write_manifest(path: Path, folder: Path, names: Iterable[str] | dict[str, str], **more) -> dict[str, str]:
    """Record files of `folder`, by name, or with the digests that are known; returns the digests.

    A folder below the manifest's own is kept relative to it.
    """
    known = names if isinstance(names, dict) else {}
    files = {name: known.get(name) or sha256_file(folder / name) for name in sorted(names)}
    inside = folder == path.parent or path.parent in folder.parents
    location = str(folder.relative_to(path.parent)) if inside else str(folder)
    write_json(path, {"folder": location, "files": files, **more})
    return files


def write_rival(
    manifest: Path,
    record: Path,
    folder: Path,
    names: Iterable[str] | dict[str, str],
    *,
    recipe: dict,
    inputs: dict[str, str],
    code: str,
    versions: dict[str, str],
    **more,
) -> None:
    """Manifest of a rival's files, and the record of how they came here."""
    files = write_manifest(manifest, folder, names)
    made = {"recipe": recipe, "inputs": inputs, "files": files, "code_sha256": code, "versions": versions}
    write_json(record, made | more)


def checked_files(path: Path) -> tuple[Path, dict[str, str]]:
    """Folder and digests of a manifest, every file checked.

    Raises:
        YardstickError: the manifest is damaged, or a file is gone or has changed since it was made.
    """
    content = read_json(path, "folder", "files")
    folder = path.parent / content["folder"]
    for name, digest in content["files"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != digest:
            raise YardstickError(f"{folder / name}: is gone or has changed; delete {path} to make or fetch it again")
    return folder, content["files"]


def candidate_path(kind: str, folder: Path, names: list[str]) -> Path:
    """What a reader of `kind` opens: the folder, or the GGUF file in it (the first part of a split one).

    Raises:
        YardstickError: there is no GGUF file, or there are several that are not parts of one.
    """
    if kind != "gguf":
        return folder
    found = sorted(name for name in names if name.endswith(".gguf"))
    if not found:
        raise YardstickError(f"{folder}: holds no .gguf file")
    if len(found) > 1 and not all("-of-" in name for name in found):
        raise YardstickError(f"{folder}: holds several .gguf files ({', '.join(found[:3])}); name one of them")
    return folder / found[0]
