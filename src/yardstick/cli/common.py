"""What every step shares: arguments, the log file, one-line errors and the lock that shows that a run is alive."""

import argparse
import errno
import fcntl
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from yardstick.errors import YardstickError

LOCK_FILE = Path(".snakemake") / "yardstick.lock"


class _Tee:
    """Standard error that is also written to the step's log file."""

    def __init__(self, stream, log) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text.replace("\r", "\n"))
        self._log.flush()
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"yardstick: {message}", file=sys.stderr)
        sys.exit(1)


def parser(description: str) -> argparse.ArgumentParser:
    """Parser with the arguments that all steps share; a wrong one is one line and exit code 1, like all wrong input."""
    result = _Parser(description=description)
    result.add_argument("--recipe", type=json.loads, default={}, help="the step's settings, as JSON")
    result.add_argument("--log", type=Path, help="also write messages to this file")
    return result


def run_step(step: Callable[[argparse.Namespace], Any], arguments: argparse.ArgumentParser) -> None:
    """Run a step; a fault of the user's ends in one line and exit code 1, ours in a traceback."""
    parsed = arguments.parse_args()
    lock = _share_lock()
    log = None
    try:
        if parsed.log:
            parsed.log.parent.mkdir(parents=True, exist_ok=True)
            log = open(parsed.log, "w", encoding="utf-8")  # noqa: SIM115 (closed at the end of the step)
            sys.stderr = _Tee(sys.stderr, log)
        step(parsed)
    except Exception as error:
        message = user_message(error)
        if message is None:
            traceback.print_exc()
        else:
            print(f"yardstick: {message}", file=sys.stderr)
        sys.exit(1)
    finally:
        if log:
            sys.stderr = sys.stderr._stream
            log.close()
        if lock:
            lock.close()


def user_message(error: Exception) -> str | None:
    """The line to show for a fault of input or machine; None for a bug of ours."""
    if isinstance(error, YardstickError):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        where = f" ({error.filename})" if error.filename else ""
        return f"cannot write{where}: {error.strerror or text}; nothing half-written was kept"
    if isinstance(error, OSError) and error.errno in (
        errno.ENOENT,
        errno.EACCES,
        errno.EIO,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.EISDIR,
    ):
        return f"cannot use {error.filename or 'a file'}: {error.strerror or text}"
    # safetensors and pyarrow wrap the system's error in their own
    if type(error).__name__ in ("SafetensorError", "ArrowInvalid", "OSError", "ArrowException"):
        for sign in ("No space left", "os error 28", "errno 28", "File too large", "os error 27"):
            if sign in text:
                return f"cannot write: {text}; free some disk and run the same command again"
    return None


def _share_lock():
    """Hold a shared lock while a step runs under a workflow, so a later run can tell whether anything is alive."""
    if not LOCK_FILE.is_file():
        return None
    handle = open(LOCK_FILE)  # noqa: SIM115 (held for the life of the step)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle
