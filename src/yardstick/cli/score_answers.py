"""Judge one run's answers, and pair them with the original's."""

from pathlib import Path

import pandas as pd

from yardstick.cli.common import parser, run_step
from yardstick.files import read_json, sha256_file, write_json
from yardstick.gsm8k.answers import judge
from yardstick.gsm8k.run import read_generations, read_problems, write_answers
from yardstick.gsm8k.statistics import accuracy, compare_runs
from yardstick.provenance import code_digest


def main(arguments) -> None:
    recipe = arguments.recipe
    record = read_json(arguments.record, "model", "name", "failed", "recipe", "provenance")
    _, problems = read_problems(arguments.problems)
    generations = read_generations(arguments.generations, len(problems))
    judged = [judge(g, p.answer, recipe["answer"]) for g, p in zip(generations, problems, strict=True)]
    categories = [category for category, _ in judged]
    frame = pd.read_parquet(arguments.generations)
    frame.insert(1, "question", [problem.question for problem in problems])
    frame["extracted"] = [extracted for _, extracted in judged]
    frame["gold"] = [problem.answer for problem in problems]
    frame["category"] = categories
    write_answers(arguments.answers, frame)
    if not record["failed"]:
        record["gsm8k"] = accuracy(categories)
        if arguments.reference:
            of_reference = read_generations(arguments.reference, len(problems))
            reference = [judge(g, p.answer, recipe["answer"])[0] for g, p in zip(of_reference, problems, strict=True)]
            record["paired"] = compare_runs(reference, categories, recipe["margin"], recipe["seed"])
    record["provenance"]["inputs"]["generations"] = sha256_file(arguments.generations)
    record["provenance"]["scored"] = {"recipe": recipe, "code_sha256": code_digest("yardstick.cli.score_answers")}
    write_json(arguments.output, record)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--problems", type=Path, required=True, help="problems.json")
    arguments.add_argument("--generations", type=Path, required=True, help="generations.parquet of the run")
    arguments.add_argument("--record", type=Path, required=True, help="generation.json of the run")
    arguments.add_argument("--reference", type=Path, help="generations.parquet of the original; not for itself")
    arguments.add_argument("--answers", type=Path, required=True, help="answers.parquet to write")
    arguments.add_argument("--output", type=Path, required=True, help="summary.json to write")
    run_step(main, arguments)
