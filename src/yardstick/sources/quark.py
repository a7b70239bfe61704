"""Source `quark:`: AMD Quark's own export, int4 or uint4 by groups of inputs and FP8 by tensor or by row.

    w[o, i] = weight_scale * (q - zero), scale and zero point of output o and group i // group_size

Layout by Quark's source (export, `Pack_4_bits` and file-to-file quantization; 2026):

- int4, uint4, per group: `weight` int32 (in by words, packed along the OUTPUTS), `weight_zero_point` int32 (groups by
  words, packed the same way) and `weight_scale` (groups by out). Words are padded, so out need not be a multiple of 8.
  `pack_method` "reorder" is AWQ's order in a word, 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits; "order" is 0..7.
  int4 codes and zero points are two's complement. The file-to-file path leaves `weight_scale` as out by groups and
  writes no zero points, which is whole only for symmetric int4.
- fp8_e4m3: `weight` F8_E4M3 (out by in) and one scale, or one for each row, a factor.

The file-to-file path packed as "order" while it wrote "reorder" into the config (amd/Quark pull request 30, 2026), and
nothing in such a file tells. Without `base` the label is obeyed. With `base`, the original's source, each int4 matrix
is decoded both ways and the one that is more like the original is taken, or neither if both look unrelated, as they do
when a rotation has been folded into the weights. Factors of input columns, which AWQ folds in, change nothing.

Other schemes (per channel int4, 2, 3 and 8 bits, MX, FP8 by block, two stages, fake quantization, schemes by layer
type) are refused by name. Scales of activations and of the KV cache are not used: activations stay as they are here.
"""

import fnmatch
from collections.abc import Callable
from typing import Any

import torch

from yardstick.errors import YardstickError
from yardstick.sources.awq import dequantize_columns, unpack_interleaved
from yardstick.sources.folder import FolderSource, Stored, matches, object_at, stored_shape, unpack_bits
from yardstick.sources.gptq import SCALES
from yardstick.sources.hf import PLAIN
from yardstick.sources.integers import Integers, checked_integers, unpack_rows
from yardstick.sources.kinds import flag, is_size, names

PACK_METHODS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reorder": unpack_interleaved,
    "order": lambda words: unpack_bits(words, 4),
}
RELATED = 0.6  # mean cosine of the columns; 4 bits give about 0.99, a wrong order 0.25, another matrix 0
COMPARED_GROUPS = 4  # of each row, when the order is looked for
ACTIVATIONS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_output_scale")


class QuarkSource(FolderSource):
    """A checkpoint that Quark exported with `quant_method` quark: quantized matrices as fp32 [out, in]."""

    def quantized(self) -> dict[str, Stored]:
        config, settings = self.path / "config.json", self.settings
        if settings.get("quant_method") != "quark":
            raise YardstickError(f"{config}: quant_method {settings.get('quant_method')} is not quark")
        export = object_at(self, "export")
        if export.get("weight_format", "real_quantized") != "real_quantized":
            raise YardstickError(f"{config}: export.weight_format {export['weight_format']} is not supported")
        if settings.get("layer_type_quant_config"):
            raise YardstickError(f"{config}: layer_type_quant_config is not supported")
        method = export.get("pack_method")
        self._pack_method = method if isinstance(method, str) else None
        packed = [stem for stem in self.stems(".weight") if self.reader.headers[f"{stem}.weight"]["dtype"] not in PLAIN]
        modules = dict.fromkeys(packed + self.stems(".weight_scale") + self.stems(".weight_zero_point"))
        return {f"{module}.weight": self._module(module) for module in modules}

    def ignored(self) -> dict[str, str]:
        activations = {name: "scale of activations, not used" for name in self.infos() if name.endswith(ACTIVATIONS)}
        return super().ignored() | activations

    def _settings_of(self, module: str) -> dict[str, Any]:
        """The scheme of a module's weight: the first of `layer_quant_config` that matches, or the global one."""
        for pattern in names(self.settings, "exclude", f"{self.path / 'config.json'}"):
            regular = pattern.startswith("re:")
            if matches(self, pattern[3:], module) if regular else fnmatch.fnmatchcase(module, pattern):
                raise YardstickError(f"{self.path}: tensor {module}.weight is quantized, but exclude has {pattern}")
        layers = object_at(self, "layer_quant_config")
        matching = (("layer_quant_config", name) for name in layers if fnmatch.fnmatchcase(module, name))
        weight = object_at(self, *next(matching, ("global_quant_config",))).get("weight")
        if not isinstance(weight, dict):
            kind = f"{len(weight)} stages" if isinstance(weight, list) else "none"
            raise YardstickError(f"{self.path}: tensor {module}.weight: a scheme of {kind} is not supported")
        return weight

    def _module(self, module: str) -> Stored:
        scheme = self._settings_of(module)
        dtype, qscheme, axis = scheme.get("dtype"), scheme.get("qscheme"), scheme.get("ch_axis")
        if dtype in ("int4", "uint4") and qscheme == "per_group" and axis in (1, -1):
            return self._grouped(module, dtype == "int4", scheme)
        if dtype == "fp8_e4m3" and (qscheme == "per_tensor" or (qscheme == "per_channel" and axis == 0)):
            if scheme.get("scale_format") not in (None, "float32"):
                raise YardstickError(
                    f"{self.path}: tensor {module}.weight_scale: {scheme['scale_format']} is not supported"
                )
            return self._fp8(module, qscheme)
        raise YardstickError(f"{self.path}: tensor {module}.weight: {dtype} {qscheme} on axis {axis} is not supported")

    def _fp8(self, module: str, qscheme: str) -> Stored:
        shape = stored_shape(self, f"{module}.weight", "F8_E4M3")
        found = self.shape(f"{module}.weight_scale")
        stored_shape(self, f"{module}.weight_scale", *SCALES, ndim=len(found))
        if found not in ([(), (1,)] if qscheme == "per_tensor" else [(shape[0],)]):
            raise YardstickError(
                f"{self.path}: tensor {module}.weight_scale has shape {list(found)}, which is not {qscheme} for "
                f"{list(shape)}"
            )

        def decode() -> torch.Tensor:
            scale = self.reader.tensor(f"{module}.weight_scale").float()
            return self.reader.tensor(f"{module}.weight").float() * scale.reshape(-1, 1)

        parts = (f"{module}.weight", f"{module}.weight_scale")
        return Stored(shape, f"quark-fp8-{qscheme.removeprefix('per_')}", parts, decode)

    def _grouped(self, module: str, signed: bool, scheme: dict[str, Any]) -> Stored:
        size = scheme.get("group_size")
        if not is_size(size):
            raise YardstickError(f"{self.path}: tensor {module}.weight: group_size {size!r} is not a size")
        if self._base is None and self._pack_method not in PACK_METHODS:
            raise YardstickError(
                f"{self.path}: tensor {module}.weight: pack_method {self._pack_method} is not supported, "
                f"{' and '.join(PACK_METHODS)} are"
            )
        in_features, words = stored_shape(self, f"{module}.weight", "I32")
        first, second = stored_shape(self, f"{module}.weight_scale", *SCALES)
        groups, parts = -(-in_features // size), [f"{module}.weight", f"{module}.weight_scale"]
        zeroed = f"{module}.weight_zero_point" in self.reader.headers
        if zeroed or not (signed and flag(scheme, "symmetric", f"{self.path / 'config.json'}")):
            parts.append(f"{module}.weight_zero_point")
            found = stored_shape(self, parts[-1], "I32")
            if found != (groups, words):
                raise YardstickError(
                    f"{self.path}: tensor {parts[-1]} has shape {list(found)}, but {module}.weight in groups of {size} "
                    f"asks for {[groups, words]}"
                )
        exported = first == groups and -(-second // 8) == words
        by_file = second == groups and -(-first // 8) == words
        if not exported and not by_file:
            raise YardstickError(
                f"{self.path}: tensor {module}.weight_scale has shape {[first, second]}, but {module}.weight has "
                f"{groups} groups and {8 * words - 7} to {8 * words} outputs"
            )
        if exported and by_file and not zeroed:
            raise YardstickError(
                f"{self.path}: tensor {module}.weight_scale has shape {[first, second]}: groups or outputs first "
                "cannot be told without zero points"
            )
        shape = (second if exported else first, in_features)

        def decode() -> torch.Tensor:
            packed, scales = self.reader.tensor(parts[0]), self.reader.tensor(parts[1])
            scales = scales if exported else scales.T
            zeros = self.reader.tensor(parts[2]) if zeroed else None
            method = self._method(parts[0], packed, scales, zeros, size, signed)
            return dequantize_grouped(packed, scales, zeros, size, method, signed)

        return Stored(shape, f"quark-{'int4' if signed else 'uint4'}-g{size}", tuple(parts), decode)

    def integers(self, name: str) -> Integers:
        """The stored integers of an int4 or uint4 matrix; int4 is shifted to 0..15.

        Raises:
            YardstickError: it is stored in another way.
        """
        module, info, what = name.removesuffix(".weight"), self.infos()[name], f"{self.path}: tensor {name}"
        if not info.scheme.startswith(("quark-int4-g", "quark-uint4-g")):
            raise YardstickError(f"{what} is stored as {info.scheme}, not as 4-bit integers")
        scheme = self._settings_of(module)
        size, signed, (out_features, in_features) = scheme["group_size"], scheme["dtype"] == "int4", info.shape
        words, scales, zeros = self.reader.tensor(name), self.reader.tensor(f"{module}.weight_scale"), None
        if tuple(scales.shape) != (-(-in_features // size), out_features):
            scales = scales.T
        if f"{module}.weight_zero_point" in self.reader.headers:
            zeros = self.reader.tensor(f"{module}.weight_zero_point")
        unpack, flip = PACK_METHODS[self._method(name, words, scales, zeros, size, signed)], 8 if signed else 0
        codes = unpack_rows(words, out_features, unpack).bitwise_xor_(flip).T
        points = torch.zeros(scales.shape, dtype=torch.int32) if zeros is None else unpack(zeros)[:, :out_features]
        return checked_integers(what, codes, scales.T, (points ^ flip).T, size)

    def _method(
        self,
        name: str,
        words: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        group_size: int,
        signed: bool,
    ) -> str:
        """The label, or with an original the order that is nearer to it by the first groups of each row."""
        original = self.original(name, (scales.shape[1], len(words)))
        if original is None:
            return self._pack_method
        inputs = COMPARED_GROUPS * group_size
        zeros = None if zeros is None else zeros[:COMPARED_GROUPS]
        try:
            return likelier_pack_method(
                words[:inputs], scales[:COMPARED_GROUPS], zeros, original[:][:, :inputs], group_size, signed
            )
        except YardstickError as error:
            raise YardstickError(f"{self.path}: tensor {name}: {error}") from None


def dequantize_grouped(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    pack_method: str,
    signed: bool,
) -> torch.Tensor:
    """fp32 [out, in] of words [in, words of outputs]; scales [groups, out], zero points packed as the words or none."""

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        codes = PACK_METHODS[pack_method](packed)
        return (codes ^ 8) - 8 if signed else codes

    points = torch.zeros(scales.shape) if zeros is None else unpack(zeros)
    return dequantize_columns(words, scales, points, group_size, unpack)


def likelier_pack_method(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    base: torch.Tensor,
    group_size: int | None = None,
    signed: bool = False,
) -> str:
    """The `pack_method` by which the words are more like the original matrix `base` [out, in], whatever their label.

    Words [in, words of outputs], scales [groups, out], zero points packed like the words, or none; the group size may
    be left out if the groups are equal. Both orders are decoded, and the cosine of each input column to the original's
    is averaged: a wrong order keeps two of eight outputs in place, and a factor of a column does not matter.

    Raises:
        YardstickError: neither resembles the original.
    """
    if group_size is None:
        if len(words) % len(scales):
            raise YardstickError(f"{len(words)} inputs do not make {len(scales)} equal groups")
        group_size = len(words) // len(scales)
    original = base.float()
    likeness = {}
    for method in PACK_METHODS:
        decoded = dequantize_grouped(words, scales, zeros, group_size, method, signed)
        likeness[method] = float(torch.cosine_similarity(decoded, original, dim=0).mean())
    method = max(likeness, key=likeness.get)
    if not likeness[method] > RELATED:
        found = ", ".join(f"{cosine:.2f} as {name}" for name, cosine in likeness.items())
        raise YardstickError(f"by no pack_method does it resemble the original (mean cosine of columns {found})")
    return method
