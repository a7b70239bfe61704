"""Open a candidate of an experiment: by the manifest or the index of its checkpoint, every file checked."""

from pathlib import Path

from yardstick.manifest import candidate_path, checked_files
from yardstick.models.folder import Original
from yardstick.sources import TensorSource, open_source


def open_candidate(kind: str, checkpoint: Path | None, original: Original) -> TensorSource:
    """The candidate's source; a noise floor is the original itself."""
    if checkpoint is None:
        return original.source
    if checkpoint.name == "manifest.json":
        place = candidate_path(kind, *checked_files(checkpoint))
    else:  # our own checkpoints are named by their index, which holds the digests
        place = checkpoint.parent
    return open_source(f"{kind}:{place}", original.config, original.source)
