"""Answers that are kept as they come, so that an interrupted run goes on where it was."""

import dataclasses
import json
import os
from pathlib import Path

from yardstick.files import canonical_json, sha256_text, write_text
from yardstick.gsm8k.generation import NOT_ASKED, Generation


class KeptAnswers:
    """A file of one line an answer, behind a line with the digest of all that the answers depend on.

    Answers of another digest are thrown away. A line that a kill cut off, or that was changed, is, too. Problems that
    could not be asked are not kept, so the next run asks them again.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.found = Path(path), {}
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n") if self.path.is_file() else []
        if lines and lines[0] == canonical_json({"digest": digest}):
            for answer in filter(None, map(_answer, lines[1:])):
                self.found[answer["index"]] = Generation(**answer["generation"])
        kept = [_line(index, generation) for index, generation in self.found.items()]
        write_text(self.path, "\n".join([canonical_json({"digest": digest}), *kept]) + "\n")

    def add(self, index: int, generation: Generation) -> None:
        """Keep an answer; it is on the disk when this returns."""
        self.found[index] = generation
        if generation.finish_reason == NOT_ASKED:
            return
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(_line(index, generation) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def finish(self) -> None:
        """Delete the file, unless a problem is still to be asked."""
        if all(generation.finish_reason != NOT_ASKED for generation in self.found.values()):
            self.path.unlink(missing_ok=True)


def _line(index: int, generation: Generation) -> str:
    answer = {"index": index, "generation": dataclasses.asdict(generation)}
    return canonical_json({"answer": answer, "sha256": sha256_text(canonical_json(answer))})


def _answer(line: str) -> dict | None:
    """The answer of a whole line; None for one that was cut off or changed."""
    try:
        record = json.loads(line)
        whole = sha256_text(canonical_json(record["answer"])) == record["sha256"]
    except (ValueError, TypeError, KeyError):
        return None
    return record["answer"] if whole else None
