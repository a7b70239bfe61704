"""Draw the plots of one model."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.report.plots import plot_kl_against_bits, plot_kl_tail
from yardstick.report.results import load_results


def main(arguments) -> None:
    results = load_results(arguments.results, arguments.model, arguments.recipe)
    plot_kl_against_bits(results, arguments.bits)
    plot_kl_tail(results, arguments.tail)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument(
        "--results", type=Path, required=True, help="folder that holds <model>/<candidate>/summary.json"
    )
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--bits", type=Path, required=True, help="scatter plot to write")
    arguments.add_argument("--tail", type=Path, required=True, help="tail plot to write")
    run_step(main, arguments)
