"""Write the model card of one candidate, from the files of its measurement."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import write_text
from yardstick.report.model_card import write_card


def main(arguments) -> None:
    write_text(arguments.output, write_card(arguments.results, arguments.model, arguments.candidate))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument(
        "--results", type=Path, required=True, help="folder that holds <model>/<candidate>/summary.json"
    )
    arguments.add_argument("--model", required=True, help="the model's name")
    arguments.add_argument("--candidate", required=True, help="the candidate's name")
    arguments.add_argument("--output", type=Path, required=True, help="card to write")
    run_step(main, arguments)
