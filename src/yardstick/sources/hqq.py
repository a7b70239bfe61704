"""Source `hqq:`: Half-Quadratic Quantization, as the hqq package saves it: `qmodel.pt`, or safetensors.

    w = (code - zero) * scale

in fp32. The weight is cut, in the order of its elements, into rows of group_size (axis 1: a scale per row) or into
group_size rows (axis 0: a scale per column). Codes are packed along the first axis of that matrix: with k codes in a
word the rows fall into k equal parts, and the first part has the highest bits. Three bits lie ten to an int32, and the
rows are filled up to a multiple of ten.

`qmodel.pt` is a pickle, which can run any code when it is opened: only torch's restricted loader is used, and what it
does not load is refused.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from yardstick.errors import YardstickError
from yardstick.sources.folder import FolderSource, Stored
from yardstick.sources.hf import PLAIN
from yardstick.sources.safetensors_file import DTYPES, SafetensorsReader, checkpoint_files

PICKLE = "qmodel.pt"
# packing -> bits of a code, codes in a word, safetensors type of the word
PACKINGS = {
    "8bit_u8": (8, 1, "U8"),
    "4bit_u8": (4, 2, "U8"),
    "3bit_32": (3, 10, "I32"),
    "2bit_u8": (2, 4, "U8"),
    "1bit_u8": (1, 8, "U8"),
}
# how hqq packs codes of each width; 6 and 5 bits take a byte
WIDTHS: dict[float, str] = {4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1.58: "2bit_u8", 1: "1bit_u8"}
WIDTHS |= dict.fromkeys((8, 6, 5), "8bit_u8")
SETTINGS = ("nbits", "group_size", "shape", "axis", "packing", "view_as_float", "quant_scale", "quant_zero")
# stored with each matrix too; how it was made and is run, which its values do not depend on
UNREAD = ("unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config")
RECIPE = ("channel_wise", "optimize", "round_zero")
LONGEST = 64  # elements of a setting; more is damage
UNSUPPORTED = {
    "zero_q": "quantized zeros",
    "scale_q": "quantized scales",
    "meta_zero": "quantized zeros",
    "meta_scale": "quantized scales",
    "zero_scale": "zeros and scales in one tensor, for offloading",
}


class HqqSource(FolderSource):
    """Dequantized to fp32. hqq writes no quantization_config; the settings stand beside each matrix."""

    reader: "SafetensorsReader | TorchReader"

    def open_reader(self) -> "SafetensorsReader | TorchReader":
        pickle = self.path / PICKLE
        return TorchReader(pickle) if pickle.is_file() else SafetensorsReader(checkpoint_files(self.path))

    def quantization_config(self) -> dict[str, Any]:
        return {}

    def quantized(self) -> dict[str, Stored]:
        stems = self.stems(".W_q")
        if not stems:
            raise YardstickError(f"{self.path}: holds no W_q; is it an HQQ checkpoint?")
        return {f"{stem}.weight": self._module(stem) for stem in stems}

    def _module(self, stem: str) -> Stored:
        settings = self._settings(stem)
        what = f"{self.path}: tensor {stem}.W_q"
        for field, reason in UNSUPPORTED.items():
            if f"{stem}.{field}" in self.reader.headers or field in settings:
                raise YardstickError(f"{what}: {reason} ({field}) are not supported")
        for field in ("quant_zero", "quant_scale"):
            if settings.get(field):
                raise YardstickError(f"{what}: quantized zeros or scales ({field}) are not supported")
        shape, axis, bits, packing = (settings.get(key) for key in ("shape", "axis", "nbits", "packing"))
        if not (isinstance(shape, tuple) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
            raise YardstickError(f"{what}: shape must be [out, in] (got {shape})")
        if type(axis) is not int or axis not in (0, 1):
            raise YardstickError(f"{what}: axis must be 0 or 1 (got {axis})")
        if not isinstance(bits, int | float) or WIDTHS.get(bits, "") != packing:
            raise YardstickError(f"{what}: nbits {bits} packed as {packing!r} is not a scheme of hqq")
        group = settings.get("group_size")
        group = (shape[1] if axis else shape[0]) if group is None else group
        if type(group) is not int or group < 1 or shape[0] * shape[1] % group:
            raise YardstickError(f"{what}: group_size must divide {shape[0]} x {shape[1]} weights (got {group})")
        groups = shape[0] * shape[1] // group
        rows, columns = (groups, group) if axis else (group, groups)
        self._check_words(stem, rows, columns, packing, bool(settings.get("view_as_float")))
        for field in ("scale", "zero"):
            name, expected = f"{stem}.{field}", (rows, 1) if axis else (1, columns)
            if self.shape(name) != expected or self.reader.headers[name]["dtype"] not in PLAIN:
                raise YardstickError(
                    f"{self.path}: tensor {name} is {self.reader.headers[name]['dtype']} {list(self.shape(name))}, "
                    f"must be floats {list(expected)}"
                )
        fields = ("W_q", "scale", "zero", *SETTINGS, *UNREAD, *RECIPE)
        parts = tuple(f"{stem}.{field}" for field in fields if f"{stem}.{field}" in self.reader.headers)
        scheme = f"hqq{bits:g}-g{group}" + ("" if axis else "-axis0")
        return Stored(shape, scheme, parts, partial(self._decode, stem, rows, packing, shape))

    def _check_words(self, stem: str, rows: int, columns: int, packing: str, as_float: bool) -> None:
        """Refuse codes of another type or size; `as_float` says that the bytes are stored under a float type."""
        name = f"{stem}.W_q"
        _, count, word = PACKINGS[packing]
        kind, shape = self.reader.headers[name]["dtype"], self.shape(name)
        if kind != word and not (as_float and kind in PLAIN):
            raise YardstickError(f"{self.path}: tensor {name} has type {kind}, must be {word} for {packing}")
        width = columns * DTYPES[word].itemsize / DTYPES[kind].itemsize
        if shape != (-(-rows // count), width) or (rows % count and packing != "3bit_32"):
            raise YardstickError(
                f"{self.path}: tensor {name} is {kind} {list(shape)}, which does not hold {rows} x {columns} codes, "
                f"{count} a word"
            )

    def _settings(self, stem: str) -> dict[str, Any]:
        """Settings of a matrix as plain values: they are such in a pickle, and small tensors in safetensors."""
        if isinstance(self.reader, TorchReader):
            return self.reader.settings.get(stem, {})
        settings: dict[str, Any] = {}
        for field in SETTINGS:
            name = f"{stem}.{field}"
            if name not in self.reader.headers:
                continue
            shape = self.shape(name)
            if len(shape) > 1 or (shape and shape[0] > LONGEST):
                raise YardstickError(f"{self.path}: tensor {name} has shape {list(shape)}: not a setting")
            values = self.reader.tensor(name).flatten().tolist()
            if field == "packing":
                settings[field] = "".join(chr(value) for value in values if type(value) is int and 0 < value < 128)
            elif field == "shape":
                settings[field] = tuple(values)
            elif len(values) == 1:
                settings[field] = round(values[0], 2) if isinstance(values[0], float) else values[0]
        return settings

    def _decode(self, stem: str, rows: int, packing: str, shape: tuple[int, int]) -> torch.Tensor:
        bits, count, word = PACKINGS[packing]
        words = self.reader.tensor(f"{stem}.W_q").view(DTYPES[word])
        values = unpack_rows(words, bits, count)[:rows].float()
        values.sub_(self.reader.tensor(f"{stem}.zero").float()).mul_(self.reader.tensor(f"{stem}.scale").float())
        return values.reshape(shape)


def unpack_rows(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes [count * rows, columns] of words [rows, columns]: the first part of the rows in the highest bits."""
    return torch.cat([(words >> (bits * (count - 1 - part))) & ((1 << bits) - 1) for part in range(count)])


class TorchReader:
    """Headers and tensors of a `qmodel.pt` as those of a safetensors file, and the settings of its modules.

    The file is mapped: a tensor's bytes are read when it is. A second name of the same bytes is left out, which is
    how a tied head is saved.
    """

    def __init__(self, path: Path) -> None:
        self.headers: dict[str, dict[str, Any]] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        types = {kind: name for name, kind in DTYPES.items()}
        self._path, self._size = path, path.stat().st_size
        seen = set()
        for module, state in load_pickle(path).items():
            if not isinstance(module, str) or not isinstance(state, dict):
                raise YardstickError(f"{path}: module {module} is not a state of tensors: damaged, or not of hqq")
            meta = state.get("meta")
            for field, value in (state | meta if isinstance(meta, dict) else state).items():
                name = f"{module}.{field}"
                if not isinstance(value, torch.Tensor):
                    self.settings.setdefault(module, {})[field] = value
                    continue
                value = value.detach()
                if value.dtype not in types or value.layout is not torch.strided or value.device.type != "cpu":
                    raise YardstickError(f"{path}: tensor {name} has type {value.dtype}, which is not supported")
                if value.numel() * value.element_size() > self._size:  # strides of 0 make anything of a few bytes
                    raise YardstickError(
                        f"{path}: tensor {name} has shape {list(value.shape)}, more than the file holds"
                    )
                bytes_of = (value.data_ptr(), value.dtype, value.shape, value.stride())
                if value.numel() and bytes_of in seen:
                    continue
                seen.add(bytes_of)
                self._tensors[name] = value
                self.headers[name] = {"dtype": types[value.dtype], "shape": list(value.shape)}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as stored.

        Raises:
            YardstickError: the file was cut after it was opened; reading a page that is gone would end the process.
        """
        if self._path.stat().st_size < self._size:
            raise YardstickError(f"{self._path}: has become shorter since it was opened")
        return self._tensors[name].contiguous()

    def stored_bits(self, name: str) -> int:
        """Bits that the tensor's data takes."""
        return 8 * self._tensors[name].numel() * self._tensors[name].element_size()


def load_pickle(path: Path) -> dict[str, Any]:
    """The states of modules in a file of `torch.save`, by the loader that makes tensors and plain values only.

    Raises:
        YardstickError: it is damaged, or holds something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged pickle leads to inside torch: this is its whole interface
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise YardstickError(f"{path}: torch's restricted loader does not load it ({reason})") from None
    if not isinstance(content, dict):
        raise YardstickError(f"{path}: holds a {type(content).__name__}, not the states of modules")
    return content
