"""Source `awq:`: AutoAWQ's int4 checkpoints, versions `gemm` and `gemv`.

    w[o, i] = scales * (q - zero), scale and zero point of output o and group i // group_size

- `gemm`: `qweight` int32 (in by words, packed along the OUTPUTS), `qzeros` int32 (groups by words, likewise), `scales`
  (groups by out). Within a word, from the lowest bits, lie outputs 0, 2, 4, 6, 1, 3, 5, 7.
- `gemv`: `qweight` int32 (out by words, packed along the inputs in their order), `qzeros` int32 (out by words of
  groups), `scales` (out by groups). The words of `qzeros` are padded to a multiple of 2 for groups of 64 and of 4 for
  groups of 32, and `scales` to 8 columns for each of those words.

Zero points are stored as they are, with no minus one. `gemv_fast`, `marlin` and `llm-awq` lay codes out for kernels,
and AMD Quark's export under this label (it has a `pack_method`) may have signed codes; all are refused by name.

Which modules are quantized is what the file holds. `modules_to_not_convert` only checks it: a module that the list
names, in full or by consecutive parts of its path ("mlp.gate", never "gate" for "gate_proj"), must not be packed.

AWQ moves factors from the inputs of a matrix into the norm or the matrix before it. Such a checkpoint is one model and
is read whole: single matrices or norms need not resemble the original's.
"""

from collections.abc import Callable

import torch

from yardstick.errors import YardstickError
from yardstick.sources.folder import FolderSource, Stored, stored_shape, unpack_bits
from yardstick.sources.gptq import SCALES
from yardstick.sources.integers import Integers, checked_integers, unpack_rows
from yardstick.sources.kinds import is_size, names

UNDO = [0, 4, 1, 5, 2, 6, 3, 7]  # position in a word of outputs 0..7
ROWS = 256  # inputs decoded at a time
VERSIONS = ("gemm", "gemv")


class AwqSource(FolderSource):
    """An AutoAWQ checkpoint: quantized matrices as fp32 [out, in], biases and the rest as stored."""

    def quantized(self) -> dict[str, Stored]:
        config, settings = self.path / "config.json", self.settings
        if settings.get("quant_method") != "awq":
            raise YardstickError(f"{config}: quant_method {settings.get('quant_method')} is not awq")
        if settings.get("pack_method"):
            raise YardstickError(
                f"{config}: pack_method {settings['pack_method']} of AMD Quark under awq is not supported"
            )
        named = {str(settings[key]).lower() for key in ("version", "format", "checkpoint_format") if settings.get(key)}
        if settings.get("backend") == "llm-awq":
            named.add("llm-awq")
        version = " and ".join(sorted(named)) or "gemm"
        if version not in VERSIONS:
            raise YardstickError(f"{config}: version {version} is not supported, {' and '.join(VERSIONS)} are")
        bits = settings.get("bits", settings.get("w_bit"))
        if bits != 4:
            raise YardstickError(f"{config}: bits {bits} is not supported, 4 is")
        size = settings.get("group_size", settings.get("q_group_size"))
        if size != -1 and not is_size(size):
            raise YardstickError(f"{config}: group_size {size!r} is not a size")
        modules = dict.fromkeys(self.stems(".qweight") + self.stems(".qzeros"))
        plain = names(settings, "modules_to_not_convert", f"{config}")
        for module in modules:
            for entry in plain:
                if f".{entry}." in f".{module}.":
                    raise YardstickError(
                        f"{self.path}: tensor {module}.qweight is quantized, but modules_to_not_convert has {entry}"
                    )
        self._version, self._size = version, size
        read = self._gemm if version == "gemm" else self._gemv
        return {f"{module}.weight": read(module, size) for module in modules}

    def integers(self, name: str) -> Integers:
        """The stored integers of a quantized matrix.

        Raises:
            YardstickError: it is stored plain.
        """
        module, info, what = name.removesuffix(".weight"), self.infos()[name], f"{self.path}: tensor {name}"
        if not info.scheme.startswith("awq-int4"):
            raise YardstickError(f"{what} is stored as {info.scheme}, not as 4-bit integers")
        out_features, in_features = info.shape
        size = in_features if self._size == -1 else self._size
        groups = -(-in_features // size)
        words, zeros, scales = (self.reader.tensor(f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
        if self._version == "gemm":
            codes = unpack_rows(words, out_features, unpack_interleaved).T
            zeros, scales = unpack_interleaved(zeros).T[:out_features], scales.T
        else:
            codes = unpack_rows(words, in_features, lambda part: unpack_bits(part, 4))
            zeros, scales = unpack_bits(zeros, 4)[:, :groups], scales[:, :groups]
        return checked_integers(what, codes, scales, zeros, size)

    def _stored(self, module: str, shape: tuple[int, int], size: int, decode: Callable[[], torch.Tensor]) -> Stored:
        scheme = "awq-int4-channel" if size == -1 else f"awq-int4-g{size}"
        return Stored(shape, scheme, tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales")), decode)

    def _require(self, name: str, wanted: tuple[int, int], why: str) -> None:
        found = stored_shape(self, name, *(SCALES if name.endswith(".scales") else ("I32",)))
        if found != wanted:
            raise YardstickError(
                f"{self.path}: tensor {name} has shape {list(found)}, but {why} asks for {list(wanted)}"
            )

    def _gemm(self, module: str, size: int) -> Stored:
        in_features, words = stored_shape(self, f"{module}.qweight", "I32")
        _, out_features = stored_shape(self, f"{module}.scales", *SCALES)
        group_size = in_features if size == -1 else size
        groups = -(-in_features // group_size)
        why = f"version gemm with {in_features} inputs in groups of {group_size}"
        self._require(f"{module}.scales", (groups, out_features), why)
        self._require(f"{module}.qweight", (in_features, -(-out_features // 8)), f"{out_features} columns of scales")
        self._require(f"{module}.qzeros", (groups, words), f"{module}.qweight in groups of {group_size}")

        def decode() -> torch.Tensor:
            words, zeros, scales = (self.reader.tensor(f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
            return dequantize_columns(words, scales, unpack_interleaved(zeros), group_size, unpack_interleaved)

        return self._stored(module, (out_features, in_features), size, decode)

    def _gemv(self, module: str, size: int) -> Stored:
        out_features, words = stored_shape(self, f"{module}.qweight", "I32")
        in_features = words * 8
        group_size = in_features if size == -1 else size
        if in_features % group_size or (group_size < 128 and group_size not in (32, 64)):
            raise YardstickError(
                f"{self.path}: tensor {module}.qweight: version gemv has no layout for {in_features} inputs in groups "
                f"of {group_size}"
            )
        groups, multiple = in_features // group_size, {32: 4, 64: 2}.get(group_size, 1)
        zero_words = -(-groups // (8 * multiple)) * multiple
        why = f"version gemv with {in_features} inputs in groups of {group_size}"
        self._require(f"{module}.qzeros", (out_features, zero_words), why)
        self._require(f"{module}.scales", (out_features, 8 * zero_words), why)

        def decode() -> torch.Tensor:
            codes = unpack_bits(self.reader.tensor(f"{module}.qweight"), 4).float()
            zeros = unpack_bits(self.reader.tensor(f"{module}.qzeros"), 4)[:, :groups].float()
            scales = self.reader.tensor(f"{module}.scales")[:, :groups].float()
            grouped = codes.unflatten(1, (groups, group_size))
            return grouped.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)

        return self._stored(module, (out_features, in_features), size, decode)


def unpack_interleaved(words: torch.Tensor) -> torch.Tensor:
    """4-bit codes (int32) along the last dimension of int32 words that hold them as 0, 2, 4, 6, 1, 3, 5, 7."""
    return unpack_bits(words, 4).unflatten(-1, (-1, 8))[..., UNDO].flatten(-2)


def dequantize_columns(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_size: int,
    unpack: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """fp32 [out, in] of words [in, words of outputs], which `unpack` makes codes of; scales [groups, out] and zero
    points [groups, out or more]. Codes and zero points beyond the last output are padding."""
    (in_features, _), out_features = words.shape, scales.shape[1]
    scales, zeros = scales.float(), zeros[:, :out_features].float()
    result = torch.empty(out_features, in_features)
    for start in range(0, in_features, ROWS):
        codes = unpack(words[start : start + ROWS])[:, :out_features].float()
        group = torch.arange(start, start + len(codes)) // group_size
        result[:, start : start + ROWS] = codes.sub_(zeros[group]).mul_(scales[group]).T
    return result
