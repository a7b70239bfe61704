"""Compute the importance matrix of a model on its calibration sequences."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import load_calibration
from yardstick.models.folder import open_original
from yardstick.models.prefill import exact_arithmetic
from yardstick.progress import progress
from yardstick.rivals.imatrix import column_square_sums, write_imatrix


def main(arguments) -> None:
    exact_arithmetic()
    original = open_original(arguments.model)
    source, config = original.source, original.config
    input_ids = load_calibration(arguments.calibration)
    with progress("imatrix", input_ids.numel(), passes=config.num_layers) as done:
        sums = column_square_sums(source, config, input_ids, arguments.recipe["batch_chunks"], done)
    write_imatrix(arguments.output, sums, input_ids.numel(), input_ids.shape[1], arguments.calibration.name)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--calibration", type=Path, required=True, help="calibration sequences")
    arguments.add_argument("--output", type=Path, required=True, help="imatrix.gguf to write")
    run_step(main, arguments)
