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

STORED = "stored.json"


class DecodedSource(HuggingFaceSource):
    """Plain tensors whose bits are those of the checkpoint that they were decoded from."""

    def __init__(self, path: Path, digests: dict[str, str] | None = None) -> None:
        super().__init__(path, digests)
        place = self.path / STORED
        if not place.is_file():
            return
        for name, entry in read_json(place, "tensors")["tensors"].items():
            if name not in self._infos:
                raise YardstickError(f"{place}: tensor {name} is not in the folder")
            match entry:
                case {"scheme": str(scheme), "bits": int(bits)} if bits > 0:
                    self._infos[name] = TensorInfo(self._infos[name].shape, scheme, bits)
                case _:
                    raise YardstickError(f"{place}: tensor {name} needs a scheme and its bits (got {entry!r})")
