"""Answers that are kept as they come, so that an interrupted run goes on where it was."""

import dataclasses
import json
import os
from pathlib import Path

from yardstick.files import canonical_json, write_text
from yardstick.gsm8k.generation import NOT_ASKED, Generation


class KeptAnswers:
    """A file of one line an answer, behind a line with the digest of all that the answers depend on.

    Answers of another digest are thrown away. A last line that a kill cut off is, too. Problems that could not be asked
    are not kept, so the next run asks them again.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.found = Path(path), {}
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n") if self.path.is_file() else []
        records = [_record(line) for line in lines]
        if records and records[0] == {"digest": digest}:
            for record in records[1:]:
                if record and record.keys() == {"index", "generation"}:
                    self.found[record["index"]] = Generation(**record["generation"])
        kept = [{"digest": digest}, *(_line(index, generation) for index, generation in self.found.items())]
        write_text(self.path, "".join(canonical_json(record) + "\n" for record in kept))

    def add(self, index: int, generation: Generation) -> None:
        """Keep an answer; it is on the disk when this returns."""
        self.found[index] = generation
        if generation.finish_reason == NOT_ASKED:
            return
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(canonical_json(_line(index, generation)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def finish(self) -> None:
        """Delete the file, unless a problem is still to be asked."""
        if all(generation.finish_reason != NOT_ASKED for generation in self.found.values()):
            self.path.unlink(missing_ok=True)


def _line(index: int, generation: Generation) -> dict:
    return {"index": index, "generation": dataclasses.asdict(generation)}


def _record(line: str) -> dict | None:
    """The object of a whole line; None for one that was cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
