"""The manifest of a model: where its Hugging Face folder lies, and the digest of every file."""

from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import canonical_json, read_json, sha256_file, sha256_text


def model_folder(manifest: Path) -> Path:
    """Folder that a manifest describes, every file checked; a relative one is relative to the manifest.

    Raises:
        YardstickError: the manifest is missing or damaged, or a file of it is gone or has changed since.
    """
    content = read_json(manifest, "folder", "files")
    folder = Path(manifest).parent / content["folder"]
    for name, digest in content["files"].items():
        if not (folder / name).is_file():
            raise YardstickError(
                f"{folder}: file {name} of {manifest} is gone; delete the manifest to fetch the model again"
            )
        if sha256_file(folder / name) != digest:
            raise YardstickError(
                f"{folder}: file {name} is not the one that {manifest} was made of; delete the manifest to start again"
            )
    return folder


def model_digest(manifest: Path) -> str:
    """Digest of the model's files, wherever they lie."""
    return sha256_text(canonical_json(read_json(manifest, "files")["files"]))
