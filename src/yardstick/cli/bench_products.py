"""Time every path through the engine at the shapes of a packed checkpoint."""

from dataclasses import asdict
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.engine.bench import bench_products, model_shapes
from yardstick.engine.choose import device_name
from yardstick.engine.measure import copy_bandwidth
from yardstick.evaluate.candidate import open_candidate
from yardstick.files import write_json
from yardstick.models.folder import open_original
from yardstick.models.prefill import exact_arithmetic, pick_device
from yardstick.progress import progress
from yardstick.provenance import package_versions


def main(arguments) -> None:
    exact_arithmetic()
    recipe, original = arguments.recipe, open_original(arguments.model)
    source, device = open_candidate("packed", arguments.checkpoint, original), pick_device()
    bandwidth = copy_bandwidth(device)
    shapes = model_shapes(source, original.config)
    found = []
    with progress("engine paths", len(shapes), "shape") as done:
        for name, shape in shapes.items():
            found += map(asdict, bench_products({name: shape}, recipe["rows"], recipe["dtypes"], bandwidth))
            done(1)
    record = {"model": recipe["model"], "candidate": recipe["candidate"], "device": device_name(device)}
    record |= {"bandwidth": bandwidth, "products": found, "versions": package_versions(), "recipe": recipe}
    write_json(arguments.output, record)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="index of the packed checkpoint")
    arguments.add_argument("--output", type=Path, required=True, help="products.json to write")
    run_step(main, arguments)
