"""Source `hf:`: an ordinary Hugging Face folder of safetensors, in one file or in shards."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from yardstick.errors import YardstickError
from yardstick.files import read_json
from yardstick.sources.base import TensorInfo, TensorSource

# parts of a checkpoint that the forward of its language model does not use
NOT_MEASURED = {"model.visual.": "vision tower, not measured", "mtp.": "multi-token prediction head, not measured"}
BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64}


class SafetensorsReader:
    """Headers and tensors of a set of safetensors files; the files are memory-mapped, not loaded."""

    def __init__(self, files: list[Path]) -> None:
        self.headers: dict[str, dict] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self._handles: dict[str, object] = {}
        self._file_of: dict[str, Path] = {}
        for path in files:
            header = self._open(path)
            self.metadata[path.name] = header.pop("__metadata__", {})
            for name, entry in header.items():
                if name in self._file_of:
                    raise YardstickError(f"{path}: tensor {name} is also in {self._file_of[name]}")
                self._file_of[name] = path
                self.headers[name] = entry

    def _open(self, path: Path) -> dict:
        """Header of a safetensors file; opening it through the library checks its length against the header."""
        try:
            self._handles[str(path)] = safe_open(path, framework="pt")
            with open(path, "rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                return json.loads(stream.read(size))
        except FileNotFoundError:
            raise YardstickError(f"{path}: no such file") from None
        except (SafetensorError, ValueError) as error:
            raise YardstickError(f"{path}: truncated or not a safetensors file ({error})") from None

    def tensor(self, name: str) -> torch.Tensor:
        """One stored tensor, as stored."""
        return self._handles[str(self._file_of[name])].get_tensor(name)

    def stored_bits(self, name: str) -> int:
        """Bits that the tensor's data takes in the file."""
        start, end = self.headers[name]["data_offsets"]
        return 8 * (end - start)


def checkpoint_files(folder: Path) -> list[Path]:
    """Safetensors files of a folder: those of its index, or the single `model.safetensors`.

    Raises:
        YardstickError: there is neither.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise YardstickError(f"{index}: holds no weight_map")
        return [folder / name for name in sorted(set(names.values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise YardstickError(f"{folder}: holds no model.safetensors and no model.safetensors.index.json")


class HuggingFaceSource(TensorSource):
    """Plain tensors (bf16, fp16, fp32), handed out in the stored type."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._reader = SafetensorsReader(checkpoint_files(self.path))
        self._infos = {}
        for name, header in self._reader.headers.items():
            if header["dtype"] not in BITS:
                raise YardstickError(
                    f"{self.path}: tensor {name} has type {header['dtype']}, which is not a plain float"
                )
            self._infos[name] = TensorInfo(
                tuple(header["shape"]), header["dtype"].lower(), self._reader.stored_bits(name)
            )

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def ignored(self) -> dict[str, str]:
        return {
            name: reason for name in self._infos for prefix, reason in NOT_MEASURED.items() if name.startswith(prefix)
        }

    def read(self, name: str) -> torch.Tensor:
        return self._reader.tensor(name)
