"""Open a candidate by its spec string, `kind:path`."""

import importlib
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.formats import DECODED_BY, KINDS
from yardstick.models.config import ModelConfig
from yardstick.sources.base import TensorInfo, TensorSource, audit_source

__all__ = ["KINDS", "TensorInfo", "TensorSource", "audit_source", "open_source"]


def open_source(spec: str, config: ModelConfig | None = None, base: TensorSource | None = None) -> TensorSource:
    """Open `hf:folder`, `packed:folder`, `gguf:file` and so on, by the kinds above.

    `config` is the model's, for formats whose files do not hold the Hugging Face names of its tensors; one that
    describes another model is refused. `base` is the original, where it is at hand, for formats whose labels are known
    to be wrong at times.

    Raises:
        YardstickError: unknown kind, or the file is missing, damaged or of another kind.
    """
    kind, separator, path = spec.partition(":")
    if kind in DECODED_BY:
        raise YardstickError(
            f"source {spec}: only {DECODED_BY[kind]} decodes this, on a GPU; name it as a rival in a config, or run "
            f"decode.py of workflow/envs/{DECODED_BY[kind]} and read what it writes as bf16dir:PATH"
        )
    if not separator or kind not in KINDS:
        raise YardstickError(f"source {spec}: must be one of {', '.join(k + ':PATH' for k in sorted(KINDS))}")
    module, name = KINDS[kind]
    return getattr(importlib.import_module(module), name).open(Path(path), config, base)
