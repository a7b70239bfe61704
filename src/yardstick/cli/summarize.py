"""Summarize one candidate's positions."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.evaluate.positions import read_positions
from yardstick.evaluate.statistics import summarize
from yardstick.files import read_json, write_json


def main(arguments) -> None:
    evaluation = read_json(arguments.evaluation, "failed", "provenance")
    if not evaluation["failed"]:  # a failed row has no figures: a mean over bad positions would look like a result
        try:
            frame = read_positions(arguments.positions)
            evaluation |= summarize(frame, arguments.recipe["seed"], arguments.recipe["own_texts"])
        except OverflowError:
            evaluation["failed"] = "the perplexity is too large for a number (mean NLL above 709)"
    evaluation["provenance"]["seed"] = arguments.recipe["seed"]
    write_json(arguments.output, evaluation)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--evaluation", type=Path, required=True, help="the candidate's evaluation.json")
    arguments.add_argument("--positions", type=Path, required=True, help="the candidate's positions.parquet")
    arguments.add_argument("--output", type=Path, required=True, help="summary.json to write")
    run_step(main, arguments)
