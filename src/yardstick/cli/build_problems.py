"""Collect the problems of the GSM8K task: the first ones as worked examples, the rest to be asked."""

import dataclasses
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import canonical_json, sha256_text, write_json
from yardstick.gsm8k.problems import load_problems


def main(arguments) -> None:
    recipe = arguments.recipe
    problems, examples = load_problems(recipe["problems"]), recipe["examples"]
    if len(problems) <= examples:
        raise YardstickError(f"gsm8k: {len(problems)} problems leave none to ask beside {examples} worked examples")
    rows = [dataclasses.asdict(problem) for problem in problems]
    content = {"examples": rows[:examples], "problems": rows[examples:]}
    digest = sha256_text(canonical_json(content))
    write_json(arguments.output, content | {"source": recipe["problems"], "sha256": digest})


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--output", type=Path, required=True, help="problems.json to write")
    run_step(main, arguments)
