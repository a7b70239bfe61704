"""Put the measurements of the engine together: speed.json, speed.md and the roofline plot."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import read_json, write_json, write_text
from yardstick.report.speed import plot_roofline, speed_document


def main(arguments) -> None:
    record = read_json(arguments.products, "products", "bandwidth", "device", "model")
    record["decode"] = [read_json(path, "mode", "step_milliseconds") for path in arguments.decode]
    write_json(arguments.json, record)
    plot_roofline(record, arguments.plot)
    write_text(arguments.output, speed_document(record) + f"\n![Roofline]({arguments.plot.name})\n")


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--products", type=Path, required=True, help="products.json")
    arguments.add_argument("--decode", type=Path, nargs="+", required=True, help="a file for each mode of decoding")
    arguments.add_argument("--json", type=Path, required=True, help="speed.json to write")
    arguments.add_argument("--plot", type=Path, required=True, help="roofline.png to write")
    arguments.add_argument("--output", type=Path, required=True, help="speed.md to write")
    run_step(main, arguments)
