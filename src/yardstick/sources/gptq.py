"""Source `gptq:`: the integer layout of GPTQ, as AutoGPTQ, GPTQModel, Optimum and AutoRound write it.

    w[o, i] = scales[g, o] * (q[i, o] - zero[g, o]),  g = g_idx[i]

A module holds `qweight` int32 (codes packed along the inputs, words by out), `qzeros` int32 (groups by words, packed
along the outputs), `scales` (groups by out) and mostly `g_idx` int32 (in). Codes of 2, 3, 4 and 8 bits lie lowest
bits first; at 3 bits, 32 of them take three words. `g_idx` gives the group of both scale and zero point; a file
without it means `i // group_size`, and so does one that is zero everywhere although there are more groups: AutoGPTQ
took that for "not set". With `desc_act` the order is not that of the columns, so there both are refused, unless the
groups are static.

What a stored zero point means depends on `checkpoint_format`:

- `gptq_v2`: the zero point.
- `gptq`, also when there is no such field: the zero point minus one. A zero point of 0 wraps, and what it does to its
  neighbours depends on the writer. The format's usual readers add one to each field and mask, and so does this one:
  a stored 15 of four bits is a zero point of 0. (Kernels that do not mask take it for 16, which no grid from minimum
  to maximum has.) GPTQModel subtracts a word of ones from the packed word, with borrows from one field to the next,
  and adds the same word on loading; a file that names it in `meta.quantizer` is read so, and that undoes the wrap.
- At 3 bits GPTQModel did this with the words of ones in the wrong order until its pull request 2763 (2026), and one
  field at a time since. Symmetric files show which; asymmetric ones do not, and are refused.

A symmetric checkpoint has half the range as every zero point (8 of four bits). One that has not under its own
`checkpoint_format` stops here: some writers put zero points as they are under the label `gptq`. Of an asymmetric one
the original tells, where it is at hand.

`dynamic` of GPTQModel overrides settings by module: the first pattern that matches wins, `-:` means not quantized.
Formats made for kernels (marlin, bitblas, exllama, GPTQModel's planar `gptq_p`) are refused by name, as are adapters,
rotations and words of another size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from yardstick.errors import YardstickError
from yardstick.sources.folder import FolderSource, Stored, matches, object_at, stored_shape, unpack_bits
from yardstick.sources.integers import Integers, checked_integers, require_contiguous, unpack_rows
from yardstick.sources.kinds import flag, is_size

WIDTHS = (2, 3, 4, 8)
VERSIONS = ("gptq", "gptq_v2")
SCALES = ("F16", "BF16", "F32")
# what GPTQModel adds to the words of `qzeros`, by their position: one for each field, at 3 bits in its old order
WORDS_OF_ONES = {2: (0x55555555,), 3: (0x24924924, 0x92492492, 0x49249249), 4: (0x11111111,), 8: (0x01010101,)}
CHECKED, MOST_SHIFT = 256, 0.5  # rows that are held against the original; steps, of which a wrong format makes one
COLUMNS = 256  # decoded at a time: the codes of a whole matrix take several times its own size


@dataclass(frozen=True)
class _Layout:
    """How one module is packed; `group_size` is the number of inputs if there is one group."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool
    in_features: int
    out_features: int
    groups: int


class GptqSource(FolderSource):
    """A GPTQ checkpoint: quantized matrices as fp32 [out, in], biases and the rest as stored.

    With `base`, the original's source, asymmetric zero points that follow another format than the one named are found.
    """

    def quantized(self) -> dict[str, Stored]:
        self._version, self._layouts = self._checkpoint_format(), {}
        modules = dict.fromkeys(self.stems(".qweight") + self.stems(".qzeros"))
        return {f"{module}.weight": self._module(module) for module in modules}

    def _checkpoint_format(self) -> str:
        config, settings = self.path / "config.json", self.settings
        if settings.get("quant_method") != "gptq":
            raise YardstickError(f"{config}: quant_method {settings.get('quant_method')} is not gptq")
        named = {str(settings[key]).lower() for key in ("checkpoint_format", "format") if settings.get(key)}
        if settings.get("is_marlin_format"):
            named.add("marlin")
        if len(named) > 1:
            raise YardstickError(f"{config}: checkpoint_format is both {' and '.join(sorted(named))}")
        version = next(iter(named), "gptq")
        if version not in VERSIONS:
            raise YardstickError(f"{config}: checkpoint_format {version} is not supported, gptq and gptq_v2 are")
        for key in ("adapter", "rotation"):
            if settings.get(key):
                raise YardstickError(f"{config}: {key} {settings[key]} is not supported")
        return version

    def _settings_of(self, module: str) -> dict[str, Any]:
        """Settings with the first rule of `dynamic` that matches the module."""
        rules = object_at(self, "dynamic")
        for pattern in rules:
            matched = matches(self, pattern.removeprefix("-:").removeprefix("+:"), module)
            if matched and pattern.startswith("-:"):
                raise YardstickError(
                    f"{self.path}: tensor {module}.qweight is quantized, but dynamic rule {pattern} says it is not"
                )
            if matched:
                return self.settings | object_at(self, "dynamic", pattern)
        return self.settings

    def _module(self, module: str) -> Stored:
        settings = self._settings_of(module)
        bits, group_size = settings.get("bits"), settings.get("group_size", -1)
        words = settings.get("pack_dtype") or "int32"
        if type(bits) is not int or bits not in WIDTHS or words != "int32":
            kind = f"bits {bits!r} in {words} words"
            raise YardstickError(
                f"{self.path}: tensor {module}.qweight: {kind} is not supported, 2, 3, 4, 8 in int32 are"
            )
        if group_size != -1 and not is_size(group_size):
            raise YardstickError(f"{self.path}: tensor {module}.qweight: group_size {group_size!r} is not a size")
        sym, desc_act = (flag(settings, key, f"{self.path / 'config.json'}") for key in ("sym", "desc_act"))
        layout = self._layout(module, bits, group_size, sym, desc_act)
        ordered = f"{module}.g_idx" in self.reader.headers
        if layout.desc_act and not ordered and layout.groups > 1 and not self._static_groups():
            raise YardstickError(f"{self.path}: tensor {module}.g_idx is missing, and desc_act needs it")
        parts = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")] + [f"{module}.g_idx"] * ordered
        groups = "channel" if group_size == -1 else f"g{group_size}"
        scheme = f"gptq-int{bits}-{groups}" + "-desc" * layout.desc_act
        shape = (layout.out_features, layout.in_features)
        self._layouts[f"{module}.weight"] = layout
        return Stored(shape, scheme, tuple(parts), lambda: self._decode(module, layout))

    def _layout(self, module: str, bits: int, group_size: int, sym: bool, desc_act: bool) -> _Layout:
        """Sizes by what the parts say together.

        Raises:
            YardstickError: they contradict each other or the settings.
        """
        rows, out_features = stored_shape(self, f"{module}.qweight", "I32")
        groups, columns = stored_shape(self, f"{module}.scales", *SCALES)
        zero_rows, zero_words = stored_shape(self, f"{module}.qzeros", "I32")
        in_features = rows * 32 // bits
        if f"{module}.g_idx" in self.reader.headers:
            (in_features,) = stored_shape(self, f"{module}.g_idx", "I32", "I64", ndim=1)
        if columns != out_features:
            raise YardstickError(
                f"{self.path}: tensor {module}.scales has {columns} columns, {module}.qweight has {out_features}"
            )
        for part, words, count in (("qzeros", zero_words, out_features), ("qweight", rows, in_features)):
            if words not in _words(count, bits):
                fitting = [str(width) for width in WIDTHS if words in _words(count, width)]
                raise YardstickError(
                    f"{self.path}: tensor {module}.{part} has {words} words for {count} codes, that is "
                    f"{' or '.join(fitting) or 'no supported number of'} bits; the settings say {bits}"
                )
        size = in_features if group_size == -1 else group_size
        if groups != -(-in_features // size):
            raise YardstickError(
                f"{self.path}: tensor {module}.scales has {groups} groups, {in_features} inputs in groups of {size} "
                f"make {-(-in_features // size)}"
            )
        if zero_rows != groups:
            raise YardstickError(
                f"{self.path}: tensor {module}.qzeros has {zero_rows} groups, {module}.scales has {groups}"
            )
        return _Layout(bits, size, sym, desc_act, in_features, out_features, groups)

    def _decode(self, module: str, layout: _Layout) -> torch.Tensor:
        scales = self.reader.tensor(f"{module}.scales").float()
        zeros, g_idx = self._zeros(module, layout).float(), self._g_idx(module, layout)
        weight = dequantize(self.reader.tensor(f"{module}.qweight"), scales, zeros, g_idx, layout.bits)
        original = None if layout.sym else self.original(f"{module}.weight", tuple(weight.shape))
        if original is not None:
            self._check_zeros(module, weight[:CHECKED], original[:CHECKED].float(), scales.T[:CHECKED, g_idx])
        return weight

    def _check_zeros(self, module: str, weight: torch.Tensor, original: torch.Tensor, steps: torch.Tensor) -> None:
        """Refuse zero points that are one off: every weight then lies a step beside the original's, on average.

        Raises:
            YardstickError: they are. Factors that smoothing folded in leave the average where it is.
        """
        used = steps > 0
        shift = float(((weight - original)[used] / steps[used]).double().mean())
        if abs(shift) > MOST_SHIFT:
            other = next(version for version in VERSIONS if version != self._version)
            raise YardstickError(
                f"{self.path}: tensor {module}.qzeros: by format {self._version} the weights lie {shift:+.2f} steps "
                f"beside the original's on average; if they are of format {other}, correct checkpoint_format"
            )

    def integers(self, name: str) -> Integers:
        """The stored integers of a 4-bit matrix.

        Raises:
            YardstickError: it has another width, or its groups are not consecutive columns.
        """
        module, layout, what = name.removesuffix(".weight"), self._layouts.get(name), f"{self.path}: tensor {name}"
        if layout is None or layout.bits != 4:
            raise YardstickError(f"{what} is stored as {self.infos()[name].scheme}, not as 4-bit integers")
        require_contiguous(what, self._g_idx(module, layout), layout.group_size)
        words, scales = self.reader.tensor(f"{module}.qweight").T, self.reader.tensor(f"{module}.scales").T
        codes = unpack_rows(words, layout.in_features, lambda part: unpack_bits(part, 4))
        return checked_integers(what, codes, scales, self._zeros(module, layout).T, layout.group_size)

    def _g_idx(self, module: str, layout: _Layout) -> torch.Tensor:
        in_order = torch.arange(layout.in_features) // layout.group_size
        if f"{module}.g_idx" not in self.reader.headers:
            return in_order
        g_idx = self.reader.tensor(f"{module}.g_idx").long()
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= layout.groups:
            raise YardstickError(f"{self.path}: tensor {module}.g_idx names groups outside 0..{layout.groups - 1}")
        if layout.groups > 1 and not bool(g_idx.any()):
            if layout.desc_act and not self._static_groups():
                raise YardstickError(f"{self.path}: tensor {module}.g_idx is 0 everywhere, and desc_act needs an order")
            return in_order
        return g_idx

    def _static_groups(self) -> bool:
        places = self.settings, object_at(self, "meta")
        return any(flag(place, "static_groups", f"{self.path / 'config.json'}") for place in places)

    def _zeros(self, module: str, layout: _Layout) -> torch.Tensor:
        """Zero points [groups, out] by the checkpoint's format and its writer.

        Raises:
            YardstickError: the format contradicts `sym`, or the writer's arithmetic cannot be told.
        """
        words, bits, half = self.reader.tensor(f"{module}.qzeros"), layout.bits, 1 << (layout.bits - 1)
        stored = unpack_bits(words, bits)[:, : layout.out_features]
        readings = {"gptq": (stored + 1) & ((1 << bits) - 1), "gptq_v2": stored}
        zeros = readings[self._version]
        by_words = unpack_bits(add_ones(words, bits), bits)[:, : layout.out_features]
        if layout.sym:
            if bool((zeros == half).all()):
                return zeros
            if self._version == "gptq" and bool((by_words == half).all()):
                return by_words
            found = ", ".join(f"{_values(value)} if {name}" for name, value in readings.items())
            raise YardstickError(
                f"{self.path}: tensor {module}.qzeros holds {_values(stored)}, which makes the zero points {found}; "
                f"checkpoint_format says {self._version} and sym asks for {half}"
            )
        if self._version == "gptq" and self._by_gptqmodel():
            if bits == 3:
                raise YardstickError(
                    f"{self.path}: tensor {module}.qzeros: GPTQModel wrote asymmetric 3-bit zero points of format gptq "
                    "in two ways, and nothing tells which; gptq_v2 would"
                )
            return by_words
        return zeros

    def _by_gptqmodel(self) -> bool:
        tools = object_at(self, "meta").get("quantizer")
        tools = tools if isinstance(tools, list) else [tools]
        return any(str(tool).lower().startswith("gptqmodel") for tool in tools)


def dequantize(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, g_idx: torch.Tensor, bits: int
) -> torch.Tensor:
    """fp32 [out, in] of words [words, out]; scales and zero points are fp32 [groups, out], g_idx int64 [in]."""
    result = torch.empty(scales.shape[1], len(g_idx))
    for start in range(0, scales.shape[1], COLUMNS):
        part = slice(start, start + COLUMNS)
        codes = unpack_bits(qweight[:, part], bits, dim=0)[: len(g_idx)].float()
        result[part] = codes.sub_(zeros[:, part][g_idx]).mul_(scales[:, part][g_idx]).T
    return result


def add_ones(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words of `qzeros` plus one for each field, as GPTQModel adds them: modulo 2^32, carrying between fields."""
    ones = WORDS_OF_ONES[bits]
    added = torch.tensor([ones[column % len(ones)] for column in range(words.shape[-1])])
    return (words.to(torch.int64) + added) & 0xFFFFFFFF


def _words(count: int, bits: int) -> set[int]:
    """Words that `count` codes can take: as few as hold them; at 3 bits also whole blocks of three."""
    words = {-(-count * bits // 32)}
    return words | {-(-count // 32) * 3} if bits == 3 else words


def _values(tensor: torch.Tensor) -> str:
    values = torch.unique(tensor).tolist()
    return "/".join(map(str, values[:4])) + "/..." * (len(values) > 4)
