"""Open a candidate by its spec string, `kind:path`."""

import importlib
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.sources.base import TensorInfo, TensorSource, audit_source

__all__ = ["KINDS", "TensorInfo", "TensorSource", "audit_source", "open_source"]

# kind -> (module, class); imported on use, so a result depends on the code of its own format only
KINDS = {
    "hf": ("yardstick.sources.hf", "HuggingFaceSource"),
    "packed": ("yardstick.sources.packed", "PackedSource"),
    "gguf": ("yardstick.sources.gguf", "GgufSource"),
    "ct": ("yardstick.sources.compressed_tensors", "CompressedTensorsSource"),
    "gptq": ("yardstick.sources.gptq", "GptqSource"),
    "awq": ("yardstick.sources.awq", "AwqSource"),
    "quark": ("yardstick.sources.quark", "QuarkSource"),
    "modelopt": ("yardstick.sources.modelopt", "ModelOptSource"),
    "bnb": ("yardstick.sources.bitsandbytes", "BitsAndBytesSource"),
    "hqq": ("yardstick.sources.hqq", "HqqSource"),
    "fp8": ("yardstick.sources.fp8", "BlockFp8Source"),
    "bf16dir": ("yardstick.sources.hf", "HuggingFaceSource"),
}


def open_source(spec: str, prefix: str = "model.") -> TensorSource:
    """Open `hf:folder`, `packed:folder`, `gguf:file` and so on, by the kinds above.

    `prefix` begins the Hugging Face names of the model's tensors, for formats whose files do not hold those names.

    Raises:
        YardstickError: unknown kind, or the file is missing, damaged or of another kind.
    """
    kind, separator, path = spec.partition(":")
    if not separator or kind not in KINDS:
        raise YardstickError(f"source {spec}: must be one of {', '.join(k + ':PATH' for k in sorted(KINDS))}")
    module, name = KINDS[kind]
    source = getattr(importlib.import_module(module), name)
    return source(Path(path), prefix) if kind == "gguf" else source(Path(path))
