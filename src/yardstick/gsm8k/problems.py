"""Problems with worked solutions and gold answers.

Kinds of source: `synthetic` (our own word problems), `file` (GSM8K's own JSON lines), `hub` (`datasets` at a pinned
revision, with GSM8K's columns).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from yardstick.corpora.arithmetic import task_problems
from yardstick.corpora.texts import decode, load_hub
from yardstick.errors import YardstickError
from yardstick.gsm8k.answers import CALCULATOR, canonical_number, extract_answer

MARK = "####"


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution, whose last line is `#### N`, and its gold answer, a canonical number."""

    question: str
    solution: str
    answer: str

    @property
    def steps(self) -> str:
        """The solution without its last line."""
        return self.solution.rpartition(MARK)[0].rstrip()


def load_problems(source: dict) -> list[Problem]:
    """The problems of a source, in its order.

    Raises:
        YardstickError: the source cannot be read, a row is not a problem, or there are fewer rows than asked for.
    """
    return READERS[source["kind"]](source)


def parse_row(row: object, what: str) -> Problem:
    """A problem from a row of GSM8K: a mapping with `question` and `answer`, the latter with its `#### N`.

    The calculator's marks are taken out of the solution; the rest of it stays as it is.

    Raises:
        YardstickError: not such a row; `what` names it.
    """
    if not isinstance(row, dict):
        raise YardstickError(f"{what}: is not an object with question and answer")
    for key in ("question", "answer"):
        value = row.get(key)
        if not isinstance(value, str) or not value.strip():
            raise YardstickError(f"{what}: has no {key}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise YardstickError(f"{what}: its {key} holds half of a surrogate pair, which is no text")
    solution = CALCULATOR.sub("", row["answer"]).strip()
    _, mark, last = solution.rpartition(MARK)
    gold = canonical_number(last) if mark else None
    if gold is None:
        raise YardstickError(f"{what}: its answer does not end in {MARK} and a number")
    if extract_answer(solution, "hash") != gold:  # generated text is read by its first number
        raise YardstickError(f"{what}: its first {MARK} gives another number than its last")
    return Problem(row["question"].strip(), solution, gold)


def _take(rows: list, source: dict, what: str) -> Iterable[tuple[int, object]]:
    """Rows `skip` to `skip + take` (all that follow without `take`) with their places in the source."""
    skip = source.get("skip", 0)
    end = skip + source["take"] if source.get("take") is not None else max(len(rows), skip + 1)
    if end > len(rows):
        raise YardstickError(f"{what}: has {len(rows)} rows, skip {skip} and take {end - skip} need {end}")
    return ((place, rows[place]) for place in range(skip, end))


def _read_synthetic(source: dict) -> list[Problem]:
    made = task_problems(source["problems"], source["seed"])
    return [Problem(problem.question, problem.worked, str(problem.answer)) for problem in made]


def _read_file(source: dict) -> list[Problem]:
    path = Path(source["path"])
    if not path.is_file():
        raise YardstickError(f"problems file {path}: no such file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise YardstickError(f"problems file {path}: cannot be read ({error.strerror})") from None
    problems = []
    for number, line in enumerate(decode(data, str(path)).split("\n"), start=1):
        if not line.strip():
            continue
        what = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise YardstickError(f"{what}: is not JSON") from None
        problems.append(parse_row(row, what))
    if not problems:
        raise YardstickError(f"problems file {path}: is empty")
    return [problem for _, problem in _take(problems, source, str(path))]


def _read_hub(source: dict) -> list[Problem]:
    rows, origin = load_hub(source)
    what = f"dataset {origin} {source['split']}"
    return [parse_row(row, f"{what} row {place}") for place, row in _take(rows, source, what)]


READERS = {"synthetic": _read_synthetic, "file": _read_file, "hub": _read_hub}
