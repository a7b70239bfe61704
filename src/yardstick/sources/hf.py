"""Source `hf:`: an ordinary Hugging Face folder of safetensors, in one file or in shards."""

from collections.abc import Iterable
from pathlib import Path

import torch

from yardstick.errors import YardstickError
from yardstick.sources.base import LazyRows, TensorInfo, TensorSource
from yardstick.sources.safetensors_file import SafetensorsReader, checkpoint_files

# parts of a checkpoint that the forward of its language model does not use
NOT_MEASURED = {"model.visual.": "vision tower, not measured", "mtp.": "multi-token prediction head, not measured"}
PLAIN = {"BF16", "F16", "F32", "F64"}


def not_measured(names: Iterable[str]) -> dict[str, str]:
    """Those of the tensors or modules that no forward of the language model reads, with the reason."""
    return {name: reason for name in names for prefix, reason in NOT_MEASURED.items() if name.startswith(prefix)}


class HuggingFaceSource(TensorSource):
    """Plain tensors (bf16, fp16, fp32), handed out in the stored type.

    `digests` are the SHA-256 that the files must have; each is checked when its first tensor is read.
    """

    def __init__(self, path: Path, digests: dict[str, str] | None = None) -> None:
        super().__init__(path)
        self.reader = SafetensorsReader(checkpoint_files(self.path), digests)
        self._infos = {}
        for name, header in self.reader.headers.items():
            if header["dtype"] not in PLAIN:
                raise YardstickError(
                    f"{self.path}: tensor {name} has type {header['dtype']}, which is not a plain float"
                )
            self._infos[name] = TensorInfo(
                tuple(header["shape"]), header["dtype"].lower(), self.reader.stored_bits(name)
            )

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def ignored(self) -> dict[str, str]:
        return not_measured(self._infos)

    def read(self, name: str) -> torch.Tensor:
        return self.reader.tensor(name)

    def rows(self, name: str) -> LazyRows:
        return LazyRows(self, name, lambda start, stop: self.reader.tensor(name, start, stop))
