"""The ways in which a packed matrix can be multiplied, each a class: made once for a matrix, called with inputs.

DEQUANTIZE  dequantize, then multiply, at every call: the reference for all others
DENSE       dequantized once and kept in the type of the inputs: fast where memory is wide, 16 or 32 bits a weight
INT4PACK    torch's own int4 product on the CPU
GEMV        Triton, one row
GEMM        Triton, 2 to 64 rows
SHUFFLED    Triton, 1 to 64 rows, codes in the kernel's own order
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError
from yardstick.quantize.pack import unpack_nibbles

MOST_ROWS = 64  # of the Triton kernels; more rows are bound by arithmetic and are dequantized first


class Path(ABC):
    """One way to multiply one packed matrix by inputs [rows, in]; gives [rows, out] in the inputs' type."""

    name: str
    rows = range(1, 2**31)  # how many rows of inputs it takes
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    has_gradient = False  # of its inputs

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, tile: dict[str, int]) -> None:
        self.in_features = weight.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product.

        Raises:
            YardstickError: the inputs do not fit, or a gradient is wanted that the path does not have.
        """
        if x.ndim != 2 or x.shape[1] != self.in_features or len(x) not in self.rows:
            raise YardstickError(
                f"path {self.name} takes {self.rows.start} to {self.rows[-1]} rows of {self.in_features}, not inputs "
                f"{list(x.shape)}"
            )
        if x.requires_grad and not self.has_gradient and torch.is_grad_enabled():
            raise YardstickError(
                f"path {self.name} has no gradient; run it under torch.no_grad(), or ask for the path dense"
            )
        return self.multiply(x)

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight that a call reads."""

    @classmethod
    def refusal(cls, weight: PackedWeight, device: torch.device) -> str | None:
        """Why this path cannot take the matrix on this device, or None."""
        return None


class Dequantize(Path):
    name = "dequantize"
    dtypes = (*Path.dtypes, torch.float64)
    has_gradient = True

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, tile: dict[str, int]) -> None:
        super().__init__(weight, dtype, tile)
        self.weight = weight

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.dequantize().to(x.dtype))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class Dense(Path):
    name = "dense"
    dtypes = (*Path.dtypes, torch.float64)
    has_gradient = True

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, tile: dict[str, int]) -> None:
        super().__init__(weight, dtype, tile)
        self.values = weight.dequantize().to(dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class Int4Pack(Path):
    """`torch.ops.aten._weight_int4pack_mm_for_cpu`: w = (code - 8) * scale + zero, so zero is minimum + 8 * scale.

    Scales and zeros are of the inputs' type: exact in fp32, while in bf16 the zero is rounded, by at most 2^-9 of
    itself. Columns are filled up to whole groups, rows to a multiple of 16.
    """

    name = "torch-int4"
    ROWS = 16  # the operator takes multiples of it

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, tile: dict[str, int]) -> None:
        super().__init__(weight, dtype, tile)
        self.out_features = weight.out_features
        groups, self.group_size = weight.scales.shape[1], weight.group_size
        self.columns = groups * self.group_size
        rows = -(-self.out_features // self.ROWS) * self.ROWS
        codes = unpack_nibbles(weight.codes, weight.in_features)
        scales = weight.scales.float()
        if weight.minima is None:  # two's complement to codes 0..15 whose middle is 8
            codes, zeros = codes ^ 8, torch.zeros_like(scales)
        else:
            zeros = weight.minima.float() + 8 * scales
        fill = rows - self.out_features
        codes = F.pad(codes, (0, self.columns - self.in_features, 0, fill)).to(torch.int32)
        self.codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        both = torch.stack((F.pad(scales, (0, 0, 0, fill)), F.pad(zeros, (0, 0, 0, fill))), dim=-1)
        self.scales = both.transpose(0, 1).contiguous().to(dtype)  # [groups, rows, 2]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, self.columns - self.in_features)).contiguous()
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(padded, self.codes, self.group_size, self.scales)
        return found[:, : self.out_features]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @classmethod
    def refusal(cls, weight: PackedWeight, device: torch.device) -> str | None:
        if device.type != "cpu":
            return "it is an operator of the CPU"
        if weight.group_size not in (32, 64, 128, 256):
            return f"it has no groups of {weight.group_size}"
        return None


class TritonPath(Path):
    """Kernels are imported when they are first asked for: without triton the other paths still work."""

    least_group: int
    tile: dict[str, int]  # used where no table has a better one

    @classmethod
    def refusal(cls, weight: PackedWeight, device: torch.device) -> str | None:
        try:
            import triton
        except ImportError:
            return "triton is not installed"
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            return "it needs a CUDA device, or TRITON_INTERPRET=1"
        size = weight.group_size
        if size < cls.least_group or not math.log2(size).is_integer():
            return f"it takes groups of a power of two from {cls.least_group} on, not of {size}"
        return None


class Gemv(TritonPath):
    name, rows, least_group = "triton-gemv", range(1, 2), 2
    tile = {"rows": 16, "groups": 1, "splits": 1, "warps": 4}

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, tile: dict[str, int]) -> None:
        from yardstick.engine.kernels.gemv import gemv

        super().__init__(weight, dtype, tile)
        self.weight, self.kernel, self.tile = weight, gemv, tile or self.tile

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x.contiguous(), self.weight, **self.tile).to(x.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class Gemm(Gemv):
    name, rows, least_group = "triton-gemm", range(2, MOST_ROWS + 1), 32
    tile = {"batch": 16, "rows": 64, "splits": 1, "warps": 4, "stages": 3}

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, tile: dict[str, int]) -> None:
        from yardstick.engine.kernels.gemm import gemm

        Path.__init__(self, weight, dtype, tile)
        self.weight, self.kernel, self.tile = weight, gemm, tile or self.tile


class Shuffled(TritonPath):
    name, rows, least_group = "triton-shuffled", range(1, MOST_ROWS + 1), 32
    tile = {"rows": 64, "batch": 16, "splits": 1, "warps": 4, "stages": 3}

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, tile: dict[str, int]) -> None:
        from yardstick.engine.kernels.shuffled import shuffle, shuffled_gemm

        super().__init__(weight, dtype, tile)
        settings = dict(tile or self.tile)
        self.weight, self.kernel = shuffle(weight, settings.pop("rows")), shuffled_gemm
        self.settings = settings

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x.contiguous(), self.weight, **self.settings).to(x.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


PATHS: dict[str, type[Path]] = {path.name: path for path in (Dequantize, Dense, Int4Pack, Gemv, Gemm, Shuffled)}


def open_path(name: str, weight: PackedWeight, dtype: torch.dtype, tile: dict[str, int] | None = None) -> Path:
    """A path by name, ready for one matrix.

    Raises:
        YardstickError: there is no such path, or it cannot take the matrix here.
    """
    cls = find_path(name, weight)
    if dtype not in cls.dtypes:
        raise YardstickError(f"path {name} takes inputs of {', '.join(map(str, cls.dtypes))}, not of {dtype}")
    return cls(weight, dtype, tile or {})


def find_path(name: str, weight: PackedWeight) -> type[Path]:
    """A path by name.

    Raises:
        YardstickError: there is no such path, or it cannot take the matrix here.
    """
    if name not in PATHS:
        raise YardstickError(f"there is no path {name!r} through the engine; there are {', '.join(PATHS)}")
    if reason := PATHS[name].refusal(weight, weight.codes.device):
        raise YardstickError(f"path {name}: {reason}")
    return PATHS[name]
