"""Source `fp8:`: FP8 (E4M3) weights with one scale per block or per tensor, as DeepSeek and Qwen publish them.

    w[r, c] = value[r, c] * weight_scale_inv[r // rows, c // columns]

The scale multiplies, whatever its name says. The last blocks of a row or column of blocks may be short.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from yardstick.errors import YardstickError
from yardstick.sources.float_formats import FP8, decode_e8m0, decode_fp8
from yardstick.sources.folder import FolderSource, Stored
from yardstick.sources.hf import PLAIN, not_measured
from yardstick.sources.kinds import names

E8M0 = {"U8", "F8_E8M0"}  # powers of two, as bytes or under their own type
ACTIVATIONS = "scale of activations, which are not quantized here"
UNUSED = {".input_scale": ACTIVATIONS, ".activation_scale": ACTIVATIONS}


class BlockFp8Source(FolderSource):
    """Dequantized to fp32; a tensor is FP8 if it is stored so, and then it has a scale."""

    def quantized(self) -> dict[str, Stored]:
        if self.settings.get("quant_method") != "fp8":
            raise YardstickError(
                f"{self.path / 'config.json'}: quant_method is {self.settings.get('quant_method')!r}, must be 'fp8'"
            )
        block = read_block_size(self.settings, f"{self.path / 'config.json'}")
        scales: dict[str, str] = {}
        for scale in self.reader.headers:
            name = scaled_tensor(scale)
            if name is None or not_measured([name]):
                continue
            if name in scales:
                raise YardstickError(f"{self.path}: tensor {name} has two scales, {scale} is one")
            scales[name] = scale
        stored = {name: self._scaled(name, scale, block) for name, scale in scales.items()}
        for name, header in self.reader.headers.items():
            if header["dtype"] in FP8 and name not in stored and not not_measured([name]):
                raise YardstickError(f"{self.path}: tensor {name}_scale_inv is missing, and {name} is FP8")
        where = f"{self.path / 'config.json'}"
        lists = (names(self.settings, key, where) for key in ("modules_to_not_convert", "ignored_layers"))
        for name in next((found for found in lists if found), []):
            if f"{name}.weight" in stored:
                raise YardstickError(
                    f"{self.path}: tensor {name}.weight is stored in FP8, but the config's modules_to_not_convert "
                    f"says that it is plain"
                )
        return stored

    def _scaled(self, name: str, scale: str, block: tuple[int, int] | None) -> Stored:
        shape, kind = self.shape(name), self.reader.headers[name]["dtype"]
        scale_shape, scale_kind = self.shape(scale), self.reader.headers[scale]["dtype"]
        if kind != "F8_E4M3":
            raise YardstickError(f"{self.path}: tensor {name} has a scale and type {kind}; must be F8_E4M3")
        if scale_kind not in PLAIN | E8M0:
            raise YardstickError(f"{self.path}: tensor {scale} has type {scale_kind}, which is not a scale")
        if len(shape) < 2:
            raise YardstickError(f"{self.path}: tensor {name} has shape {list(shape)}, must be a matrix")
        grid = ()
        if block is not None:
            grid = (*shape[:-2], *(-(-length // size) for length, size in zip(shape[-2:], block, strict=True)))
        # where the config makes several blocks, a single scale is not theirs
        scheme, fits = "fp8", scale_shape in ((), (1,)) and all(size == 1 for size in grid)
        if not fits and block is not None:
            scheme, fits = f"fp8-b{block[0]}x{block[1]}", scale_shape == grid
        if not fits:
            size = "no weight_block_size" if block is None else f"blocks of {block[0]} x {block[1]}"
            raise YardstickError(
                f"{self.path}: tensor {scale} has shape {list(scale_shape)}, which does not fit {name} "
                f"{list(shape)} and {size}"
            )
        scheme += "-e8m0" if scale_kind in E8M0 else ""
        return Stored(shape, scheme, (name, scale), partial(self._decode, name, scale, block))

    def _decode(self, name: str, scale: str, block: tuple[int, int] | None) -> torch.Tensor:
        scales = self.reader.tensor(scale)
        scales = decode_e8m0(scales) if self.reader.headers[scale]["dtype"] in E8M0 else scales.float()
        return dequantize_blocks(self.reader.tensor(name), scales, block)

    def ignored(self) -> dict[str, str]:
        return super().ignored() | unused(self.infos(), UNUSED)


def scaled_tensor(scale: str) -> str | None:
    """Name of the tensor that a tensor of this name scales, or None: `m.weight_scale_inv` scales `m.weight`."""
    if scale.endswith("_scale_inv"):
        return scale.removesuffix("_scale_inv")
    return scale.removesuffix("_scale") if scale.endswith(".weight_scale") else None


def unused(names: Mapping[str, Any], suffixes: dict[str, str]) -> dict[str, str]:
    """Names that end with one of the suffixes, each with the suffix's reason."""
    return {name: reason for name in names for suffix, reason in suffixes.items() if name.endswith(suffix)}


def read_block_size(settings: dict[str, Any], where: str) -> tuple[int, int] | None:
    """`weight_block_size`: rows and columns of a block; None where a tensor has one scale.

    Raises:
        YardstickError: it is not two positive integers.
    """
    block = settings.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise YardstickError(f"{where}: weight_block_size = {block}, must be two positive integers")
    return block[0], block[1]


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """fp32 [..., out, in] of FP8 and fp32 scales [..., ceil(out / rows), ceil(in / columns)], or one scale.

    Leading dimensions are experts: each has blocks of its own, and the last rows of one share none with the next.
    """
    values = decode_fp8(codes)
    if block is None or scales.numel() == 1:
        return values.mul_(scales.reshape(()))
    out_features, in_features = values.shape[-2:]
    rows, columns = min(block[0], out_features), min(block[1], in_features)
    scales = scales.repeat_interleave(columns, dim=-1)[..., :in_features]
    for i in range(scales.shape[-2]):
        values[..., i * rows : (i + 1) * rows, :].mul_(scales[..., i : i + 1, :])
    return values
