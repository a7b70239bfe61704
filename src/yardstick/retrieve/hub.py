"""Files from the Hugging Face hub at a pinned revision: resumable, and checked against the hub's own digests.

The listing comes through `huggingface_hub`. The bytes do not: since version 1 the library throws away what an
interrupted process had, and a killed download of 55 GB would begin again.
"""

import fnmatch
import hashlib
import os
import re
import time
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import sha256_file
from yardstick.progress import progress

TRIES, PAUSE_SECONDS, TIMEOUT_SECONDS, PIECE = 5, 2.0, 60.0, 1 << 20

MODEL_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config*",
    "tokenizer*",
    "*.jinja",
]


def download(
    what: str, repository: str, revision: str, patterns: list[str], folder: Path, pins: dict[str, str] | None = None
) -> dict[str, str]:
    """Download the files of `repository` at commit `revision` that match `patterns`; returns their SHA-256 by name.

    No code of the repository is run. An interrupted download goes on where it stopped. A file that is not the one
    the hub lists (or that `pins` names by SHA-256) is fetched again once.

    Raises:
        YardstickError: the revision is not a commit, repository, revision or file do not exist, the hub cannot be
            reached, or a file still differs when it was fetched a second time.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise YardstickError(f"{what}: revision {revision} must be a full commit id of 40 hex digits")
    from huggingface_hub import HfApi, hf_hub_url

    origin = f"{repository}@{revision[:12]}"
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception as error:  # the library raises its own, httpx's and the system's errors
        raise YardstickError(f"{what}: {explain(error, repository, revision)}") from None
    listed = {file.rfilename: file for file in info.siblings or []}
    for pattern in patterns:
        if not any(character in pattern for character in "*?[") and pattern not in listed:
            raise YardstickError(f"{what}: {origin} holds no file {pattern}")
    names = sorted(name for name in listed if any(fnmatch.fnmatch(name, pattern) for pattern in patterns))
    unsafe = [name for name in names if name.startswith("/") or ".." in Path(name).parts]
    if not names or unsafe:
        fault = f"lists a file outside its folder ({unsafe[0]})" if unsafe else f"holds no file {', '.join(patterns)}"
        raise YardstickError(f"{what}: {origin} {fault}")
    unused = sorted(set(pins or {}) - set(names))
    if unused:
        raise YardstickError(
            f"{what}: sha256 pins {unused[0]}, which is not among the files ({', '.join(names)[:200]})"
        )
    digests = {}
    for name in names:
        path, pin, fault = folder / name, (pins or {}).get(name), None
        for attempt in range(3):  # what is there already, and two downloads
            if attempt:
                url = hf_hub_url(repository, name, revision=revision)
                fetch(url, path, listed[name].size, f"{what}: {origin}: {name}")
            elif not path.is_file():
                continue
            digests[name] = sha256_file(path)
            fault = difference(path, digests[name], listed[name], pin)
            if fault is None:
                break
            path.unlink()
        else:
            raise YardstickError(f"{what}: {origin}: {name}: {fault}, also when fetched again; it was not kept")
    return digests


def fetch(url: str, path: Path, size: int | None, what: str) -> None:
    """Download `url` to `path`, going on after what an earlier call had of it.

    Raises:
        YardstickError: the server refuses, or the connection broke several times without progress.
    """
    import httpx
    from huggingface_hub.utils import build_hf_headers

    part = path.with_name(f".part-{path.name}")
    part.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    with progress(what, size or 1, "byte") as done:
        while True:
            start = part.stat().st_size if part.is_file() else 0
            if size is not None and start == size:
                break
            headers = build_hf_headers() | ({"Range": f"bytes={start}-"} if start else {})
            try:
                with httpx.stream(
                    "GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_SECONDS
                ) as answer:
                    if answer.status_code == 416:  # what is there is longer than the file
                        part.unlink()
                        continue
                    answer.raise_for_status()
                    # a server that ignores the range sends the file from its beginning
                    with open(part, "ab" if answer.status_code == 206 else "wb") as stream:
                        for piece in answer.iter_raw(PIECE):
                            stream.write(piece)
                            done(len(piece))
                            failures = 0
                if size is None or part.stat().st_size >= size:
                    break
                fault = "the connection ended early"
            except httpx.HTTPStatusError as error:
                raise YardstickError(f"{what}: the hub answered {error.response.status_code}") from None
            except httpx.HTTPError as error:
                fault = str(error) or type(error).__name__
            failures += 1
            if failures >= TRIES:
                raise YardstickError(
                    f"{what}: {fault}, {TRIES} times; what has arrived is kept, run the same command to go on"
                )
            time.sleep(PAUSE_SECONDS * failures)
    os.replace(part, path)


def difference(path: Path, sha256: str, listed, pin: str | None) -> str | None:
    """In what a file, whose SHA-256 was just taken, differs from the hub's listing or from its pin."""
    if listed.size is not None and path.stat().st_size != listed.size:
        return f"has {path.stat().st_size} bytes, the hub lists {listed.size}"
    if pin or listed.lfs:
        expected = pin or listed.lfs["sha256"]
        origin = "the config pins" if pin else "the hub lists"
        return None if sha256 == expected else f"has sha256 {sha256}, {origin} {expected}"
    if listed.blob_id and git_blob_id(path) != listed.blob_id:
        return f"has git id {git_blob_id(path)}, the hub lists {listed.blob_id}"
    return None


def explain(error: Exception, repository: str, revision: str) -> str:
    """One line for what the library raised."""
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "GatedRepoError", "HFValidationError"):
        return f"the hub has no repository {repository}, or it is private or gated (then log in with `hf auth login`)"
    if kind == "RevisionNotFoundError":
        return f"{repository} has no revision {revision}"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else kind
    return f"{repository}@{revision[:12]} cannot be downloaded from the hub ({reason})"


def git_blob_id(path: Path) -> str:
    """The id that git, and so the hub, gives to a small file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
