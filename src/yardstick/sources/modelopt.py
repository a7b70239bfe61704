"""Source `modelopt:`: NVIDIA ModelOpt exports, NVFP4 and FP8 weights, in one scheme or mixed by layer.

    NVFP4: w[r, c] = e2m1[r, c] * (weight_scale[r, c // 16] * weight_scale_2)
    FP8:   w[r, c] = e4m3[r, c] * weight_scale

`weight_scale_2` multiplies (compressed-tensors stores a divisor in its place); block scale times tensor scale is
rounded to fp32 first, as ModelOpt does. Two FP4 codes a byte, the first in the low nibble.
"""

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from yardstick.errors import YardstickError
from yardstick.files import read_json
from yardstick.quantize.pack import unpack_nibbles
from yardstick.sources.float_formats import decode_e2m1, decode_fp8
from yardstick.sources.folder import FolderSource, Stored
from yardstick.sources.fp8 import ACTIVATIONS, unused
from yardstick.sources.hf import PLAIN, not_measured
from yardstick.sources.kinds import names

GROUP = 16
ROWS = 4096  # decoded at a time: a quantized head of 248 thousand rows needs no memory beyond its values
# W4A16_NVFP4 stores what NVFP4 stores, and leaves activations alone
LAYER_ALGORITHMS = {"NVFP4", "W4A16_NVFP4", "FP8"}
ALGORITHMS = LAYER_ALGORITHMS | {"MIXED_PRECISION"}
CACHE = "scale of the key-value cache, which is not quantized here"
UNUSED = {".input_scale": ACTIVATIONS, ".k_scale": CACHE, ".v_scale": CACHE}


class ModelOptSource(FolderSource):
    """Dequantized to fp32; each tensor's scheme is that of its parts in the file."""

    def quantization_config(self) -> dict[str, Any]:
        """Settings from config.json, or from hf_quant_config.json where that holds none."""
        config, where = read_json(self.path / "config.json"), self.path / "config.json"
        inner = config.get("text_config")
        inner = inner if isinstance(inner, dict) else {}
        settings = config.get("quantization_config") or inner.get("quantization_config")
        if settings is None:
            where = self.path / "hf_quant_config.json"
            settings = {"quant_method": "modelopt"} | read_json(where, "quantization")
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        if method != "modelopt":
            raise YardstickError(f"{where}: quant_method is {method!r}, must be 'modelopt'")
        settings = settings.get("quantization", settings)
        if not isinstance(settings, dict):
            raise YardstickError(f"{where}: quantization must be an object")
        algorithm = str(settings.get("quant_algo")).upper()
        if algorithm not in ALGORITHMS:
            raise YardstickError(
                f"{where}: quant_algo {algorithm} is not supported; must be one of {', '.join(sorted(ALGORITHMS))}"
            )
        return settings

    def quantized(self) -> dict[str, Stored]:
        stored = {}
        for name, header in self.reader.headers.items():
            if not_measured([name]):
                continue
            if name.endswith(".pre_quant_scale"):
                raise YardstickError(
                    f"{self.path}: tensor {name}: AWQ scales, which change the activations, are not supported"
                )
            if name.endswith(".weight_scale") or (name.endswith(".weight") and header["dtype"] not in PLAIN):
                stem = name.removesuffix("_scale").removesuffix(".weight")
                stored[stem + ".weight"] = self._module(stem)
        return stored

    def _module(self, stem: str) -> Stored:
        weight, scale, factor = f"{stem}.weight", f"{stem}.weight_scale", f"{stem}.weight_scale_2"
        self._refuse_by_config(stem)
        shape, kind = self.shape(weight), self.reader.headers[weight]["dtype"]
        scale_shape, scale_kind = self.shape(scale), self.reader.headers[scale]["dtype"]
        if len(shape) != 2:
            raise YardstickError(f"{self.path}: tensor {weight} has shape {list(shape)}, must be a matrix")
        if kind == "F8_E4M3":
            if scale_kind not in PLAIN or scale_shape not in ((), (1,)):
                raise YardstickError(
                    f"{self.path}: tensor {scale} is {scale_kind} {list(scale_shape)}; FP8 has one float per tensor"
                )
            return Stored(shape, "fp8", (weight, scale), partial(self._decode_fp8, weight, scale))
        if kind != "U8" or scale_kind != "F8_E4M3":
            raise YardstickError(
                f"{self.path}: tensor {weight} is {kind} with a scale of {scale_kind}: neither NVFP4 (U8, F8_E4M3) nor "
                f"FP8 (F8_E4M3, one float)"
            )
        shape = (shape[0], 2 * shape[1])
        if shape[1] % GROUP or scale_shape != (shape[0], shape[1] // GROUP):
            raise YardstickError(
                f"{self.path}: tensor {scale} has shape {list(scale_shape)}, must have one scale per {GROUP} of "
                f"{list(shape)}"
            )
        if self.shape(factor) not in ((), (1,)) or self.reader.headers[factor]["dtype"] not in PLAIN:
            raise YardstickError(f"{self.path}: tensor {factor} must be one float")
        return Stored(shape, "nvfp4", (weight, scale, factor), partial(self._decode_nvfp4, weight, scale, factor))

    def _refuse_by_config(self, stem: str) -> None:
        """Refuse what the config says is plain, or is quantized in a way that this reader does not know."""
        layers = self.settings.get("quantized_layers") or {}
        layer = layers.get(stem) if isinstance(layers, dict) else None
        algorithm = layer.get("quant_algo") if isinstance(layer, dict) else None
        if algorithm is not None and str(algorithm).upper() not in LAYER_ALGORITHMS:
            raise YardstickError(f"{self.path}: tensor {stem}.weight: quant_algo {algorithm} is not supported")
        lists = (
            names(self.settings, key, f"{self.path}: quantization settings") for key in ("exclude_modules", "ignore")
        )
        for pattern in next((found for found in lists if found), []):
            if fnmatchcase(stem, pattern):
                raise YardstickError(
                    f"{self.path}: tensor {stem}.weight is stored quantized, but the config excludes {pattern}"
                )

    def _decode_fp8(self, weight: str, scale: str) -> torch.Tensor:
        return decode_fp8(self.reader.tensor(weight)).mul_(self.reader.tensor(scale).float().reshape(()))

    def _decode_nvfp4(self, weight: str, scale: str, factor: str) -> torch.Tensor:
        return dequantize_nvfp4(
            self.reader.tensor(weight), self.reader.tensor(scale), self.reader.tensor(factor).float().reshape(())
        )

    def ignored(self) -> dict[str, str]:
        return super().ignored() | unused(self.infos(), UNUSED)


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """fp32 [out, in] of uint8 [out, in / 2], E4M3 [out, in / 16] and an fp32 scalar."""
    scales = decode_fp8(scales) * factor
    values = torch.empty(packed.shape[0], 2 * packed.shape[1])
    for start in range(0, len(values), ROWS):
        rows = slice(start, start + ROWS)
        values[rows] = decode_e2m1(unpack_nibbles(packed[rows], values.shape[1]))
        values[rows].unflatten(1, (-1, GROUP)).mul_(scales[rows, :, None])
    return values
