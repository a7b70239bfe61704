"""A model from the Hugging Face hub at a pinned revision: resumable, and checked against the hub's own digests."""

import hashlib
import re
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import require_sha256

PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
]


def download_model(repository: str, revision: str, folder: Path) -> None:
    """Download weights, config and tokenizer of `repository` at commit `revision` into `folder`.

    No code of the repository is fetched or run. An interrupted download goes on where it stopped.

    Raises:
        YardstickError: the revision is not a commit, the hub cannot be reached, or a file differs from its digest.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise YardstickError(f"model {repository}: revision {revision} must be a full commit id of 40 hex digits")
    from huggingface_hub import HfApi, snapshot_download

    try:
        snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=PATTERNS)
        files = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
    except Exception as error:  # the library raises its own, httpx's and the system's errors for "not reachable"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise YardstickError(
            f"model {repository}@{revision[:12]}: cannot be downloaded from the hub ({reason})"
        ) from None
    for file in files:
        path = folder / file.rfilename
        if not path.is_file():
            continue
        if file.lfs:
            require_sha256(path, file.lfs["sha256"], f"{repository}: {file.rfilename}")
        elif file.blob_id and git_blob_id(path) != file.blob_id:
            raise YardstickError(f"{repository}: {file.rfilename} is not the file that the hub lists; delete {path}")


def git_blob_id(path: Path) -> str:
    """The id that git, and so the hub, gives to a small file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
