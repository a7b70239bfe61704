"""Source `ct:`: folders in the compressed-tensors format, as llm-compressor writes them.

    w[r, c] = (codes[r, c] - zero[r // h, c // w]) * scale[r // h, c // w]

in blocks of h rows and w columns: the whole matrix (strategy tensor), a row (channel), w columns of a row (group), or
h x w (block). With `weight_g_idx` the column of scale and zero is g_idx[c] instead of c // w. NVFP4 stores a divisor
of the scales, `weight_global_scale`; MX formats store the exponents of the scales.

Stored values are multiplied in fp32. With 16-bit scales that is exact, and rounding it to the scale's type gives what
the library makes, which computes in that type. NVFP4 follows the library's order, scale by global scale first.

The file says what is quantized, the config how to read it. A module that the config quantizes and the file stores
plain is plain; one that the file stores quantized must match a group.
"""

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from yardstick.errors import YardstickError
from yardstick.quantize.pack import unpack_nibbles
from yardstick.sources.base import LazyRows
from yardstick.sources.float_formats import decode_e2m1, decode_e8m0, decode_fp8
from yardstick.sources.folder import FolderSource, Stored, unpack_bits
from yardstick.sources.hf import PLAIN
from yardstick.sources.integers import Integers, checked_integers, require_contiguous, unpack_rows
from yardstick.sources.kinds import flag, is_size, names

TILE = 1 << 22  # weights decoded at a time: unpacking takes many times the memory of its result
OFFLINE = {"weight_input", "weight_output"}  # transforms that the weights already hold
# kind -> stored tensor of the codes, its type, types of the scales
KINDS = {
    "pack": ("weight_packed", "I32", PLAIN),
    "int": ("weight", "I8", PLAIN),
    "fp8": ("weight", "F8_E4M3", PLAIN),
    "nvfp4": ("weight_packed", "U8", {"F8_E4M3"}),
    "mxfp4": ("weight_packed", "U8", {"U8"}),
    "mxfp8": ("weight", "F8_E4M3", {"U8"}),
}
# formats, type, bits, group size (0: any) -> kind
FORMATS = (
    (("pack-quantized",), "int", range(2, 9), 0, "pack"),
    (("int-quantized", "naive-quantized"), "int", range(2, 9), 0, "int"),
    (("float-quantized", "naive-quantized"), "float", (8,), 0, "fp8"),
    (("nvfp4-pack-quantized",), "float", (4,), 16, "nvfp4"),
    (("mxfp4-pack-quantized",), "float", (4,), 32, "mxfp4"),
    (("mxfp8-quantized",), "float", (8,), 32, "mxfp8"),
)
UNUSED = {
    f"{of}_{what}": f"{'cache' if of in 'qkv' else 'activations'} not quantized in this measurement"
    for of in ("input", "output", "q", "k", "v")
    for what in ("scale", "zero_point", "global_scale")
}


@dataclass
class Matrix:
    """One quantized matrix, from headers and config: `grid` is the shape of its scales, `block` what shares one."""

    module: str
    kind: str
    bits: int
    shape: tuple[int, int]
    block: tuple[int, int]
    dense: bool
    factor: float
    ordered: bool = False
    zero: str = ""  # or "stored", "packed"

    @property
    def grid(self) -> tuple[int, int]:
        return math.ceil(self.shape[0] / self.block[0]), math.ceil(self.shape[1] / self.block[1])


class CompressedTensorsSource(FolderSource):
    """Quantized tensors in fp32, the rest as stored."""

    def quantized(self) -> dict[str, Stored]:
        self._version = [int(number) for number in re.findall(r"\d{1,12}", str(self.settings.get("version") or ""))]
        self._targets, self._skipped = read_groups(self.settings, f"{self.path / 'config.json'}")
        for name in self.reader.headers:
            if name.endswith((".bitmask", ".compressed")):
                self._refuse(name, "belongs to a sparse weight, which is not supported")
        self._matrices: dict[str, Matrix] = {}
        stored = {}
        for module in dict.fromkeys(self.stems(".weight_packed") + self.stems(".weight")):
            name = f"{module}.weight"
            if name in self.reader.headers and self.reader.headers[name]["dtype"] in PLAIN:
                continue
            matrix, parts, scheme = self._describe(module)
            stored[name] = Stored(matrix.shape, scheme, parts, partial(self._decode, matrix))
            self._matrices[name] = matrix
        return stored

    def ignored(self) -> dict[str, str]:
        unused = {name: UNUSED.get(name.rpartition(".")[2]) for name in self.infos()}
        return super().ignored() | {name: reason for name, reason in unused.items() if reason}

    def rows(self, name: str) -> torch.Tensor | LazyRows:
        if name not in self._matrices:
            return super().rows(name)
        matrix = self._matrices[name]
        side = self._side(matrix)
        return LazyRows(self, name, lambda start, stop: self._decode_rows(matrix, side, start, stop))

    def integers(self, name: str) -> Integers:
        """The stored integers of an int4 matrix.

        Raises:
            YardstickError: it is stored in another way, or its groups are not consecutive columns of one row.
        """
        matrix = self._matrices.get(name)
        if matrix is None or matrix.bits != 4 or matrix.kind not in ("pack", "int"):
            self._refuse(name, f"is stored as {self._infos[name].scheme}, not as 4-bit integers")
        if matrix.block[0] != 1:
            self._refuse(name, f"is stored as {self._infos[name].scheme}, where rows share a scale")
        scale, zero, columns = self._side(matrix)
        what = f"{self.path}: tensor {name}"
        require_contiguous(what, columns, matrix.block[1])
        codes = self.reader.tensor(f"{matrix.module}.{KINDS[matrix.kind][0]}")
        if matrix.kind == "pack":
            codes = unpack_rows(codes, matrix.shape[1], lambda words: unpack_bits(words, 4))
        else:
            codes = codes.to(torch.int16) + 8
        zeros = torch.full_like(scale, 8) if zero is None else zero + 8
        return checked_integers(what, codes, scale, zeros, matrix.block[1])

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise YardstickError(f"{self.path}: tensor {name} {reason}")

    def _describe(self, module: str) -> tuple[Matrix, tuple[str, ...], str]:
        """All that headers and config say of a matrix, checked against each other; its parts; its scheme."""
        name = f"{module}.weight"
        kind, args = self._scheme(module)
        part, dtype, scales = KINDS[kind]
        parts, bits = [part, "weight_scale"], args["num_bits"]
        rows, width = shape = self._require(f"{module}.{part}", {dtype}, None)
        if kind == "pack":
            parts.append("weight_shape")
            self._require(f"{name}_shape", {"I32", "I64"}, (2,))
            shape = tuple(self.reader.tensor(f"{name}_shape").flatten().tolist())
            if shape[0] != rows:
                self._refuse(f"{name}_shape", f"says {list(shape)}, but {module}.{part} has {rows} rows")
        elif kind.endswith("fp4"):
            shape = rows, 2 * width
        if min(shape) < 1:
            self._refuse(f"{module}.{part}", f"makes a matrix of {list(shape)}, which holds nothing")
        block, label = self._block(name, args, shape)
        dense = kind != "pack" or self._is_dense(f"{module}.{part}", bits, shape[1], width)
        matrix = Matrix(module, kind, bits, shape, block, dense, self._mxfp4_factor(name) if kind == "mxfp4" else 1.0)
        self._require(f"{name}_scale", scales, matrix.grid)
        if kind == "nvfp4":
            parts.append("weight_global_scale")
            self._require(f"{name}_global_scale", {"F32"}, (1, 1))
        if f"{name}_g_idx" in self.reader.headers or args.get("actorder") in ("group", "dynamic", True):
            matrix.ordered = True
            parts.append("weight_g_idx")
            self._require(f"{name}_g_idx", {"I32", "I64"}, (shape[1],))
        if not flag(args, "symmetric", f"{self.path / 'config.json'}", default=True):
            matrix.zero = self._zero_layout(matrix)
            parts.append("weight_zero_point")
        elif f"{name}_zero_point" in self.reader.headers:
            self._refuse(f"{name}_zero_point", "is stored, but the config says that the weight is symmetric")
        scheme = f"ct-int{bits}-{label}" if kind in ("pack", "int") else f"ct-{kind}"
        scheme += f"-{label}" * (kind == "fp8") + "-asym" * bool(matrix.zero) + "-actorder" * matrix.ordered
        return matrix, tuple(f"{module}.{part}" for part in parts), scheme

    def _scheme(self, module: str) -> tuple[str, dict[str, Any]]:
        """Kind and weight arguments that the config gives a module which the file stores quantized."""
        name = f"{module}.weight"
        for pattern in self._skipped:
            if match_rank(module, pattern) is not None:
                self._refuse(name, f"is stored quantized, but the config ignores it ({pattern})")
        found = [(rank, target) for target in self._targets if (rank := match_rank(module, target)) is not None]
        if not found:
            self._refuse(name, "is stored quantized, but matches no group of the config")
        group = self._targets[min(found)[1]]
        args, form = group["weights"], group.get("format") or self.settings.get("format")
        type_, bits, size = args.get("type", "int"), args.get("num_bits"), args.get("group_size")
        for forms, known, widths, group_size, kind in FORMATS:
            if form in forms and type_ == known and type(bits) is int and bits in widths and group_size in (0, size):
                return kind, args
        self._refuse(name, f"has scheme {form} with {type_}{bits} and group size {size}, which is not supported")

    def _block(self, name: str, args: dict[str, Any], shape: tuple[int, int]) -> tuple[tuple[int, int], str]:
        """Rows and columns that share a scale, and what the scheme calls them."""
        size = args.get("group_size")
        strategy = args.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
        sides = [int(side) for side in re.findall(r"\d{1,18}", str(args.get("block_structure")))]
        if strategy == "tensor":
            return shape, strategy
        if strategy == "channel":
            return (1, shape[1]), strategy
        if strategy in ("group", "tensor_group") and is_size(size):
            return (1, size), f"g{size}"
        if strategy == "block" and len(sides) == 2 and min(sides) > 0:
            return (sides[0], sides[1]), f"b{sides[0]}x{sides[1]}"
        self._refuse(name, f"has strategy {strategy} with group size {size} and blocks {sides}, which is not supported")

    def _require(self, name: str, dtypes: set[str], shape: tuple[int, ...] | None) -> tuple[int, ...]:
        """Check type and shape of a stored part, where axes of size 1 count for nothing; without a shape, a matrix."""
        stored, dtype = self.shape(name), self.reader.headers[name]["dtype"]
        fits = len(stored) == 2 if shape is None else [n for n in stored if n != 1] == [n for n in shape if n != 1]
        if dtype not in dtypes or not fits:
            expected = f"{' or '.join(sorted(dtypes))} {list(shape or ('out', 'in'))}"
            self._refuse(name, f"is {dtype} {list(stored)}, its scheme asks for {expected}")
        return stored

    def _is_dense(self, name: str, bits: int, count: int, words: int) -> bool:
        """Whether codes fill the words without gaps, as since 0.18, or each word starts with a code, as before it: the
        same for widths that divide 32. Else the number of words tells, or for short rows the version."""
        sizes = [word_count(count, bits, dense) for dense in (False, True)]
        if words not in sizes:
            self._refuse(name, f"holds {words} words a row, but {count} codes of {bits} bits take {sizes[1]}")
        if sizes[0] != sizes[1]:
            return words == sizes[1]
        if 32 % bits == 0 or self._version >= [0, 18]:
            return True
        if not self._version or self._version >= [0, 17, 2]:
            self._refuse(name, f"may have either layout of {bits}-bit codes; the config's version does not tell which")
        return False

    def _mxfp4_factor(self, name: str) -> float:
        """What the file's scales are to be multiplied with: release 0.13.0 stored them four times too small, with bias
        125. Nightly builds up to January 2026 may have either bias, files of auto-round always the right one."""
        if self.settings.get("provider") == "auto-round" or self._version >= [0, 13, 1, 20260120]:
            return 1.0
        if self._version == [0, 13, 0]:
            return 4.0
        self._refuse(name, f"is MXFP4 of version {self.settings.get('version')}, which leaves the bias of scales open")

    def _zero_layout(self, matrix: Matrix) -> str:
        """Zero points have the shape of the scales, or are packed like codes, but along the rows."""
        name, (rows, columns) = f"{matrix.module}.weight_zero_point", matrix.grid
        if matrix.kind not in ("pack", "int"):
            self._refuse(name, f"makes an asymmetric {matrix.kind} scheme, which is not supported")
        packed = word_count(rows, matrix.bits, matrix.dense), columns
        if matrix.kind == "pack" and self.shape(name) == packed and self.reader.headers[name]["dtype"] == "I32":
            return "packed"
        self._require(name, {"I8", "I32"}, matrix.grid)
        return "stored"

    def _side(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Scales and zeros of the grid in fp32, and the column of the grid for every column of the matrix."""
        name = f"{matrix.module}.weight"
        scale, zero = self.reader.tensor(f"{name}_scale").reshape(matrix.grid), None
        scale = decode_e8m0(scale) * matrix.factor if matrix.kind.startswith("mx") else scale.to(torch.float32)
        if matrix.kind == "nvfp4":
            scale = scale / self.reader.tensor(f"{name}_global_scale").reshape(1, 1)
        if matrix.zero:
            zero = self.reader.tensor(f"{name}_zero_point")
            if matrix.zero == "packed":
                zero = unpack_signed(zero.T, matrix.bits, matrix.grid[0], matrix.dense).T
            zero = zero.reshape(matrix.grid).to(torch.float32)
        columns = torch.arange(matrix.shape[1]) // matrix.block[1]
        if matrix.ordered:
            columns = self.reader.tensor(f"{name}_g_idx").reshape(-1).to(torch.int64)
            if columns.min() < 0 or columns.max() >= matrix.grid[1]:
                self._refuse(f"{name}_g_idx", f"points outside of {matrix.grid[1]} groups")
        return scale, zero, columns

    def _decode(self, matrix: Matrix) -> torch.Tensor:
        side, result = self._side(matrix), torch.empty(matrix.shape)
        step = max(TILE // matrix.shape[1], 1)
        for start in range(0, matrix.shape[0], step):
            result[start : start + step] = self._decode_rows(matrix, side, start, start + step)
        return result

    def _decode_rows(self, matrix: Matrix, side: tuple, start: int, stop: int) -> torch.Tensor:
        scale, zero, columns = side
        codes = self.reader.tensor(f"{matrix.module}.{KINDS[matrix.kind][0]}", start, stop)
        if matrix.kind == "pack":
            weights = unpack_signed(codes, matrix.bits, matrix.shape[1], matrix.dense).to(torch.float32)
        elif matrix.kind.endswith("fp4"):
            weights = decode_e2m1(unpack_nibbles(codes, matrix.shape[1]))
        else:
            weights = decode_fp8(codes) if matrix.kind.endswith("fp8") else codes.to(torch.float32)
        rows = torch.arange(start, start + len(codes)) // matrix.block[0]
        if zero is not None:
            weights -= zero.index_select(0, rows).index_select(1, columns)
        return weights.mul_(scale.index_select(0, rows).index_select(1, columns))


def read_groups(settings: dict[str, Any], where: str) -> tuple[dict[str, dict], list[str]]:
    """Target -> its group, and the ignore list; of two groups with one target the later counts, as in the library.

    Raises:
        YardstickError: the config is not of its kind, or transforms activations, which the forward does not.
    """
    method = settings.get("quant_method", "compressed-tensors")  # files of 2024 had none
    if method != "compressed-tensors":
        raise YardstickError(f"{where}: quant_method {method} is not compressed-tensors")
    if not isinstance(settings.get("config_groups"), dict):
        raise YardstickError(f"{where}: config_groups must be an object of groups")
    try:
        groups, ignored = settings["config_groups"].values(), names(settings, "ignore", where)
        groups = [group | {"weights": dict(group.get("weights") or {})} for group in groups]
        targets = {target: group for group in groups for target in names(group, "targets", where)}
        for pattern in [*targets, *ignored]:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        transforms = ((settings.get("transform_config") or {}).get("config_groups") or {}).values()
        online = {str(step["location"]) for transform in transforms for step in transform["apply"]} - OFFLINE
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError, re.error) as error:
        raise YardstickError(f"{where}: config_groups, ignore or transform_config is damaged ({error!r})") from None
    if online:
        raise YardstickError(f"{where}: transform_config changes activations ({', '.join(sorted(online))})")
    return targets, ignored


def match_rank(module: str, pattern: str) -> int | None:
    """How a target or an ignore entry names a module: 0 exactly, 1 by a pattern from the start of the name, 2 by class,
    None not at all. Matrices are of class Linear, but for the embedding."""
    if pattern == module:
        return 0
    if pattern.startswith("re:"):
        return 1 if re.match(pattern.removeprefix("re:"), module) else None
    return 2 if pattern == ("Embedding" if module.endswith("embed_tokens") else "Linear") else None


def word_count(count: int, bits: int, dense: bool) -> int:
    """Words of 32 bits that hold `count` codes."""
    return math.ceil(count * bits / 32) if dense else math.ceil(count / (32 // bits))


def unpack_signed(words: torch.Tensor, bits: int, count: int, dense: bool) -> torch.Tensor:
    """Signed codes from words along the last axis, stored with 2^(bits - 1) added, lowest bits first."""
    codes = unpack_bits(words, bits) if dense else unpack_bits(words.unsqueeze(-1), bits).flatten(-2)
    return codes[..., :count] - (1 << (bits - 1))
