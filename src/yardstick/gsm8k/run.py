"""Ask the problems of a run that have no answer yet, and write the table of all of them."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from yardstick.errors import YardstickError
from yardstick.files import atomic_path, read_json
from yardstick.gsm8k.generation import NOT_ASKED, Generation
from yardstick.gsm8k.kept import KeptAnswers
from yardstick.gsm8k.problems import Problem

Ask = Callable[[list[int]], Iterator[tuple[int, Generation]]]  # answers of the problems of these numbers


def read_problems(path: Path) -> tuple[list[Problem], list[Problem]]:
    """Worked examples and problems of problems.json.

    Raises:
        YardstickError: missing or damaged.
    """
    content = read_json(path, "examples", "problems")
    try:
        examples, problems = ([Problem(**row) for row in content[part]] for part in ("examples", "problems"))
    except TypeError as error:
        raise YardstickError(f"{path}: damaged ({error})") from None
    return examples, problems


def answer_all(count: int, kept: KeptAnswers, ask: Ask, reverse: bool, on_answer: Callable[[int], None]) -> None:
    """Ask every problem that has no answer yet, keeping each answer as it comes."""
    missing = [index for index in range(count) if index not in kept.found]
    on_answer(count - len(missing))
    if not missing:
        return
    for index, generation in ask(missing[::-1] if reverse else missing):
        kept.add(index, generation)
        on_answer(1)


def write_generations(path: Path, prompts: list[str], found: dict[int, Generation], failed: str | None = None) -> None:
    """One row a problem, in order: what was asked and what came back. A run that failed has not asked the rest."""
    rows = []
    for index, prompt in enumerate(prompts):
        generation = found.get(index, Generation("", NOT_ASKED, fault=failed))
        rows.append({"problem": index, "prompt": prompt} | dataclasses.asdict(generation))
    frame = pd.DataFrame(rows).rename(columns={"text": "output"})
    write_answers(path, frame.astype({"problem": "int32", "tokens": "Int32"}))


def write_answers(path: Path, frame: pd.DataFrame) -> None:
    """Write a table of answers, atomically, with a checksum of every page."""
    with atomic_path(path) as temporary:
        frame.to_parquet(temporary, index=False, compression="zstd", write_page_checksum=True)


def read_generations(path: Path, problems: int) -> list[Generation]:
    """What came back for each problem, in order.

    Raises:
        YardstickError: missing, damaged, or of another number of problems.
    """
    try:
        frame = pd.read_parquet(path, page_checksum_verification=True)
        faults = [fault if isinstance(fault, str) else None for fault in frame["fault"]]
        found = [
            Generation(str(row.output), str(row.finish_reason), None if pd.isna(row.tokens) else int(row.tokens), fault)
            for row, fault in zip(frame.itertuples(), faults, strict=True)
        ]
        order = frame["problem"].tolist()
    except FileNotFoundError:
        raise YardstickError(f"{path}: no such file") from None
    except Exception as error:  # pyarrow's errors share no class
        raise YardstickError(f"{path}: damaged ({' '.join(str(error).split())[:120]})") from None
    if order != list(range(problems)):
        raise YardstickError(f"{path}: holds {len(found)} answers to {problems} problems; delete it to run again")
    return found


def not_asked(found: dict[int, Generation]) -> int:
    """How many problems could not be asked."""
    return sum(generation.finish_reason == NOT_ASKED for generation in found.values())
