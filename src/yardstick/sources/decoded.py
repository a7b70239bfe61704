"""Source `bf16dir:`: weights that another tool spelled out, with what the original checkpoint stores for them.

The folder is plain safetensors. `stored.json` beside them names, for each tensor that stands for a quantized one, its
scheme and its bits in the checkpoint that was decoded; a tensor it does not name counts as it lies there. Without the
file everything does.
"""

from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import read_json
from yardstick.sources.base import TensorInfo
from yardstick.sources.hf import HuggingFaceSource
from yardstick.sources.kinds import is_size

STORED = "stored.json"


class DecodedSource(HuggingFaceSource):
    """Plain tensors whose bits are those of the checkpoint that they were decoded from."""

    def __init__(self, path: Path, digests: dict[str, str] | None = None) -> None:
        super().__init__(path, digests)
        place = self.path / STORED
        if not place.exists():
            return
        tensors = read_json(place, "tensors")["tensors"]
        if not isinstance(tensors, dict):
            raise YardstickError(f"{place}: tensors must be an object")
        for name, entry in tensors.items():
            if name not in self._infos:
                raise YardstickError(f"{place}: tensor {name} is not in the folder")
            scheme, bits = (entry.get("scheme"), entry.get("bits")) if isinstance(entry, dict) else (None, None)
            if not isinstance(scheme, str) or not is_size(bits):
                raise YardstickError(f"{place}: tensor {name} needs a scheme and its bits (got {entry!r})")
            self._infos[name] = TensorInfo(self._infos[name].shape, scheme, bits)
