"""Open a candidate by its spec string, `kind:path`."""

import importlib
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.formats import DECODED_BY, KINDS
from yardstick.sources.base import TensorInfo, TensorSource, audit_source

__all__ = ["KINDS", "TensorInfo", "TensorSource", "audit_source", "open_source"]


def open_source(spec: str, prefix: str = "model.", base: TensorSource | None = None) -> TensorSource:
    """Open `hf:folder`, `packed:folder`, `gguf:file` and so on, by the kinds above.

    `prefix` begins the Hugging Face names of the model's tensors, for formats whose files do not hold those names.
    `base` is the original, where it is at hand, for formats whose labels are known to be wrong at times.

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
    source = getattr(importlib.import_module(module), name)
    if kind in ("quark", "gptq"):
        return source(Path(path), base)
    return source(Path(path), prefix) if kind == "gguf" else source(Path(path))
