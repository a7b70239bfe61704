"""Make one quantized variant of a model: a checkpoint of our own, resumed layer by layer."""

import importlib
import re
import sys
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import canonical_json, sha256_file, sha256_text, write_json
from yardstick.models.folder import open_original
from yardstick.models.prefill import exact_arithmetic
from yardstick.provenance import code_digest, package_versions
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.methods import TRANSFORMS, is_folded, modules_of, transforms_of


def main(arguments) -> None:
    exact_arithmetic()
    recipe, original = arguments.recipe, open_original(arguments.model)
    matrices = [*original.config.body_matrices(), "lm_head.weight"]
    if recipe["keep_bf16"] and not any(re.search(recipe["keep_bf16"], name) for name in matrices):
        raise YardstickError(f"keep_bf16: {recipe['keep_bf16']!r} is found in no matrix name, such as {matrices[0]}")
    modules = modules_of(recipe)
    inputs = {"model": original.digest}
    if arguments.calibration:
        inputs["calibration"] = sha256_file(arguments.calibration)
    starts = {"starts": arguments.start} if arguments.start else {}
    if starts:
        inputs["starts"] = [sha256_file(path) for path in arguments.start]
    proof = {"recipe": recipe, "inputs": inputs, "code_sha256": code_digest("yardstick.cli.quantize", *modules)}
    writer = PackedWriter(arguments.output.parent, sha256_text(canonical_json(proof)))
    source, config = original.source, original.config
    for name in transforms_of(recipe):
        transform = importlib.import_module(TRANSFORMS[name]).transform
        source, config = transform(source, config, recipe["transform"][name], recipe, writer, arguments.calibration)
    method = importlib.import_module(modules[0])
    shards = method.quantize_model(source, config, recipe, writer, arguments.calibration, **starts)
    folder = arguments.start[0].parent if starts else original.folder
    reports = writer.finish(shards, recipe, folder, is_folded(recipe))
    not_below = [r["name"] for r in reports if r["output_error"] >= r["output_error_rtn"]]
    if reports:
        print(
            f"output error below round-to-nearest's for {len(reports) - len(not_below)} of {len(reports)} matrices",
            file=sys.stderr,
        )
    write_json(
        arguments.record,
        {**proof, "versions": package_versions(), "matrices": reports, "not_below_rtn": not_below} | writer.facts,
    )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--calibration", type=Path, help="calibration sequences, where the method uses them")
    arguments.add_argument(
        "--start", type=Path, action="append", help="index of a packed checkpoint that the method works on"
    )
    arguments.add_argument("--output", type=Path, required=True, help="index of the checkpoint to write")
    arguments.add_argument("--record", type=Path, required=True, help="quantize.json to write")
    run_step(main, arguments)
