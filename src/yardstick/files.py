"""Whole files or none: atomic writes, digests and JSON."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from yardstick.errors import YardstickError


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give a temporary path beside `target`; move it there when the block ends, delete it when the block fails.

    The name starts with a dot and ends with the target's own name, so writers that look at the suffix still work.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".tmp-", suffix="-" + target.name, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes private files; results are for everybody
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder beside `target`; it takes the target's place when the block ends, and is deleted when the
    block fails."""
    temporary = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: the form that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def write_json(target: Path, value: Any) -> None:
    """Write readable JSON, atomically. A NaN or an infinity is an error: no result may hold one unseen."""
    write_text(target, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def one_key_metadata(value: Any) -> dict[str, str]:
    """Metadata of a safetensors file under one key: with several, their order, and so the file's digest, is random."""
    return {"yardstick": canonical_json(value)}


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Read a JSON object that must hold `keys`.

    Raises:
        YardstickError: the file is missing, is not JSON or not an object, or lacks a key.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise YardstickError(f"{path}: no such file") from None
    except OSError as error:
        raise YardstickError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and lists in lists
        raise YardstickError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise YardstickError(f"{path}: damaged: holds a {type(value).__name__}, not an object")
    missing = [key for key in keys if key not in value]
    if missing:
        raise YardstickError(f"{path}: damaged: key {missing[0]!r} is missing")
    return value


def sha256_text(text: str) -> str:
    """SHA-256 of the UTF-8 bytes of `text`, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_sha256(path: Path, expected: str, what: str) -> None:
    """Refuse a file whose digest is not the pinned one.

    Raises:
        YardstickError: names the file, both digests and what to do.
    """
    found = sha256_file(path)
    if found != expected:
        raise YardstickError(
            f"{what}: sha256 of {path} is {found}, the config pins {expected}; delete the file or correct the pin"
        )
