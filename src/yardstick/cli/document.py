"""Write quantization.md, the whole record."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import read_json, write_text
from yardstick.report.document import write_record
from yardstick.report.gsm8k import load_answers
from yardstick.report.results import load_results


def main(arguments) -> None:
    models = [
        (
            load_results(arguments.results, model, arguments.recipe),
            read_json(arguments.corpora / model / "manifest.json", "evaluation", "calibration"),
            arguments.results,
            arguments.recipe["recorded"].get(model),
            load_answers(arguments.answers, model, arguments.recipe["answering"].get(model, [])),
        )
        for model in arguments.recipe["models"]
    ]
    write_text(arguments.output, write_record(models, arguments.benchmarks))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument(
        "--results", type=Path, required=True, help="folder that holds <model>/<candidate>/summary.json"
    )
    arguments.add_argument("--answers", type=Path, required=True, help="folder of the GSM8K results")
    arguments.add_argument("--corpora", type=Path, required=True, help="folder that holds <model>/manifest.json")
    arguments.add_argument("--benchmarks", type=Path, required=True, help="folder of what the runs cost")
    arguments.add_argument("--output", type=Path, required=True, help="quantization.md to write")
    run_step(main, arguments)
