"""Draw where in the model one candidate's loss comes from."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import read_json
from yardstick.report.attribution_plot import plot_attribution


def main(arguments) -> None:
    plot_attribution(read_json(arguments.attribution, "branches", "failed"), arguments.output)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--attribution", type=Path, required=True, help="the candidate's attribution.json")
    arguments.add_argument("--output", type=Path, required=True, help="plot to write")
    run_step(main, arguments)
