"""Write the table of the GSM8K task: one section a model."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import write_text
from yardstick.report.gsm8k import gsm8k_sections, load_answers


def main(arguments) -> None:
    parts = ["# Answers to arithmetic in words\n"]
    for model, names in arguments.recipe.items():
        parts += [f"## {model}\n", *gsm8k_sections(load_answers(arguments.results, model, names))]
    write_text(arguments.output, "\n".join(parts))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--results", type=Path, required=True, help="folder that holds <model>/<name>/summary.json")
    arguments.add_argument("--output", type=Path, required=True, help="table.md to write")
    run_step(main, arguments)
