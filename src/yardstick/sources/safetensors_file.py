"""Read safetensors files, one tensor or some of its rows at a time, without mapping them into memory.

Pages of a mapped file count as the process's memory while it is open: a checkpoint read through a map grows to its
own size. Here a tensor takes its bytes and nothing stays behind.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from yardstick.errors import YardstickError
from yardstick.files import read_json, sha256_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsReader:
    """Headers and tensors of a set of safetensors files.

    `files` are those of `checkpoint_files`, each with the tensors that an index says it has.
    `digests` maps file names to the SHA-256 that they must have; a file is checked when its first tensor is read, so
    a step that needs one shard of a large model reads one.
    """

    def __init__(self, files: dict[Path, list[str]], digests: dict[str, str] | None = None) -> None:
        self.headers: dict[str, dict] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self._file_of: dict[str, Path] = {}
        self._data_start: dict[Path, int] = {}
        self._unchecked = {path: digests[path.name] for path in files if digests and path.name in digests}
        for path in files:
            header = self._open(path)
            self.metadata[path.name] = header.pop("__metadata__", {})
            for name, entry in header.items():
                if name in self._file_of:
                    raise YardstickError(f"{path}: tensor {name} is also in {self._file_of[name]}")
                self._file_of[name] = path
                self.headers[name] = entry
        for path, names in files.items():
            for name in names:
                if self._file_of.get(name) != path:
                    raise YardstickError(f"{path}: tensor {name} is missing, and the index says that it is here")

    def _open(self, path: Path) -> dict:
        """Header of a safetensors file; opening it through the library checks its length against the header."""
        try:
            with safe_open(path, framework="pt"), open(path, "rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                self._data_start[path] = 8 + size
                return json.loads(stream.read(size))
        except FileNotFoundError:
            raise YardstickError(f"{path}: no such file") from None
        except OSError as error:  # safetensors leaves out strerror
            raise YardstickError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (SafetensorError, ValueError) as error:
            raise YardstickError(f"{path}: truncated or not a safetensors file ({error})") from None

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """One stored tensor as stored, or its rows from `start` to `stop`.

        Raises:
            YardstickError: the file is not the one that its digest was taken of, or ends too early.
        """
        path, header = self._file_of[name], self.headers[name]
        self._check(path)
        if header["dtype"] not in DTYPES:
            raise YardstickError(f"{path}: tensor {name} has type {header['dtype']}, which is not supported")
        shape, (first, last) = list(header["shape"]), header["data_offsets"]
        if shape:
            start, stop, _ = slice(start, stop).indices(shape[0])
            row = (last - first) // max(shape[0], 1)
            first, shape[0] = first + start * row, max(stop - start, 0)
        result = torch.empty(shape, dtype=DTYPES[header["dtype"]])
        buffer = result.reshape(-1).view(torch.uint8).numpy()
        with open(path, "rb", buffering=0) as stream:
            stream.seek(self._data_start[path] + first)
            filled = 0
            while filled < len(buffer):  # a read may stop at 2 GB
                count = stream.readinto(memoryview(buffer)[filled:])
                if not count:
                    raise YardstickError(f"{path}: ends inside tensor {name}")
                filled += count
        return result

    def stored_bits(self, name: str) -> int:
        """Bits that the tensor's data takes in the file."""
        start, end = self.headers[name]["data_offsets"]
        return 8 * (end - start)

    def check_all(self) -> None:
        """Check the digests of all files now, for a reader that is not ours.

        Raises:
            YardstickError: a file has changed.
        """
        for path in list(self._unchecked):
            self._check(path)

    def _check(self, path: Path) -> None:
        expected = self._unchecked.get(path)
        if expected and sha256_file(path) != expected:
            raise YardstickError(
                f"{path}: its sha256 is not the one on record: changed or damaged; delete it to make it again"
            )
        self._unchecked.pop(path, None)


def checkpoint_files(folder: Path) -> dict[Path, list[str]]:
    """Safetensors files of a folder: those of its index, each with its tensors, or the single `model.safetensors`.

    Raises:
        YardstickError: there is neither.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise YardstickError(f"{index}: holds no weight_map")
        odd = [name for name in names.values() if not isinstance(name, str) or Path(name).name != name]
        if odd:
            raise YardstickError(f"{index}: names the shard {odd[0]!r}, which is not a file beside it")
        files: dict[Path, list[str]] = {folder / shard: [] for shard in sorted(set(names.values()))}
        for name, shard in names.items():
            files[folder / shard].append(name)
        single = folder / "model.safetensors"
        if single.is_file() and single not in files:
            raise YardstickError(f"{folder}: holds both {single.name} and an index of other files; which is meant?")
        return files
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": []}
    raise YardstickError(f"{folder}: holds no model.safetensors and no model.safetensors.index.json")
