"""Hold each matrix of one candidate against the original's, on the inputs that the original gives it."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.evaluate.candidate import open_candidate
from yardstick.evaluate.probe import ProbedMatrix, probe_matrices, summarize_probe
from yardstick.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from yardstick.manifest import checked_files
from yardstick.models.folder import open_original
from yardstick.models.prefill import exact_arithmetic, expected_tensors, pick_device, stored_name
from yardstick.progress import progress
from yardstick.provenance import code_digest, machine, package_versions
from yardstick.sources import KINDS, TensorInfo, audit_source
from yardstick.sources.safetensors_file import SafetensorsReader


def main(arguments) -> None:
    exact_arithmetic()
    recipe, original = arguments.recipe, open_original(arguments.model)
    config, source = original.config, open_candidate(recipe["source"], arguments.checkpoint, original)
    audit_source(source, expected_tensors(config, source))
    probe = read_json(arguments.inputs, "stages", "positions", "model", "recipe")
    if probe["model"] != original.digest:
        raise YardstickError(f"{arguments.inputs}: was made of another model than {arguments.model}; make it again")
    folder, files = checked_files(arguments.inputs)
    stage_of = {name: stage for stage, names in probe["stages"].items() for name in names}
    reader = SafetensorsReader({folder / name: [] for name in files})
    matrices, infos = [], source.infos()
    weights = sum(infos[stored_name(name, source, config)].numel for name in stage_of)
    with progress(f"probe {arguments.name}", weights, unit="weight") as done:
        for matrix in probe_matrices(
            source, original.source, config, stage_of, lambda name: reader.tensor(stage_of[name])
        ):
            matrices.append(matrix)
            done(infos[matrix.name].numel)
    fault = next((matrix.fault for matrix in matrices if matrix.fault), None)
    write_json(
        arguments.output,
        {
            "model": recipe["model"],
            "candidate": arguments.name,
            "failed": fault,
            "positions": probe["positions"],
            **({} if fault else summarize_probe(matrices)),
            "matrices": [described(matrix, infos[matrix.name]) for matrix in matrices],
            "recipe": recipe,
            "provenance": {
                "recipe_sha256": sha256_text(canonical_json(recipe)),
                "inputs": {
                    "model": original.digest,
                    "probe": sha256_text(canonical_json(files)),
                    "checkpoint": sha256_file(arguments.checkpoint),
                },
                "code_sha256": code_digest("yardstick.cli.probe", KINDS[recipe["source"]][0]),
                "versions": package_versions(),
                "machine": machine(),
                "device": str(pick_device()),
                "dtype": probe["recipe"]["dtype"],
            },
        },
    )


def described(matrix: ProbedMatrix, info: TensorInfo) -> dict:
    """One matrix as the record holds it; errors that are not numbers are null."""
    return {
        "name": matrix.name,
        "layer": matrix.layer,
        "kind": matrix.kind,
        "scheme": info.scheme,
        "bits": info.bits / info.numel,
        "output_error": None if matrix.fault else matrix.output_error,
        "weight_error": None if matrix.fault else matrix.weight_error,
        "smoothing": " and ".join(matrix.smoothing) or None,
    }


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the candidate's name")
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="the candidate's manifest or index")
    arguments.add_argument("--inputs", type=Path, required=True, help="manifest of the original's inputs")
    arguments.add_argument("--output", type=Path, required=True, help="probe.json to write")
    run_step(main, arguments)
