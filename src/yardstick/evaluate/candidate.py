"""Open what is measured, and the proof of what a measurement was made by."""

from pathlib import Path

from yardstick.evaluate.divergence import METRIC_VERSION
from yardstick.files import canonical_json, sha256_text
from yardstick.manifest import candidate_path, checked_files
from yardstick.models.folder import Original
from yardstick.models.prefill import pick_device
from yardstick.provenance import code_digest, machine, package_versions
from yardstick.sources import TensorSource, open_source


def open_candidate(kind: str, checkpoint: Path | None, original: Original) -> TensorSource:
    """The candidate's source; a noise floor is the original itself.

    A checkpoint is named by its manifest, or by a file of it: a GGUF file, or the index of its shards, which in ours
    holds the digests.
    """
    if checkpoint is None:
        return original.source
    if checkpoint.name == "manifest.json":
        place = candidate_path(kind, *checked_files(checkpoint))
    else:
        place = checkpoint if kind == "gguf" else checkpoint.parent
    return open_source(f"{kind}:{place}", original.config, original.source)


def proof(recipe: dict, inputs: dict[str, str], modules: list[str], dtype: str) -> dict:
    """What a measurement follows from: digests of recipe, inputs and code, versions, machine, device, arithmetic."""
    return {
        "recipe_sha256": sha256_text(canonical_json(recipe)),
        "inputs": inputs,
        "code_sha256": code_digest(*modules),
        "metric_version": METRIC_VERSION,
        "versions": package_versions(),
        "machine": machine(),
        "device": str(pick_device()),
        "dtype": dtype,
    }
