"""A packed matrix in memory, as its checkpoint stores it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from yardstick.errors import YardstickError
from yardstick.quantize.pack import dequantize, group_count, pack_nibbles, unpack_nibbles


@dataclass(frozen=True)
class PackedWeight:
    """int4 codes of a matrix [out, in] with a scale, and a minimum or none, per group of input columns.

    With minima a code is 0..15 and `w = code * scale + minimum` (`quantize.pack`, the packing contract). Without them
    it is a two's-complement nibble, -8..7, and `w = code * scale`: the symmetric variant of other formats.

    Attributes:
        codes: uint8 [out, ceil(in / 2)], element 2j of a row in the low nibble of byte j.
        scales: bf16 [out, ceil(in / group_size)].
        minima: as `scales`, or None.
        in_features: columns; the last group, and the last byte of a row, may be short.
        group_size: columns that share a scale.
        terms: matrices whose sum is meant, rows behind each other. Here `out` counts the rows of all of them, and so do
            the kernels; `QuantLinear` adds their outputs up.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    in_features: int
    group_size: int
    terms: int = 1

    def __post_init__(self) -> None:
        rows, groups = len(self.codes), group_count(self.in_features, self.group_size)
        wanted = {"codes": (self.codes, -(-self.in_features // 2), torch.uint8)}
        wanted["scales"] = (self.scales, groups, torch.bfloat16)
        if self.minima is not None:
            wanted["minima"] = (self.minima, groups, torch.bfloat16)
        for name, (tensor, columns, dtype) in wanted.items():
            if (tuple(tensor.shape), tensor.dtype) != ((rows, columns), dtype):
                raise YardstickError(
                    f"{name} of a packed matrix are {tensor.dtype} {list(tensor.shape)}, [{rows}, {self.in_features}] "
                    f"in groups of {self.group_size} asks for {dtype} {[rows, columns]}"
                )
            if not tensor.is_contiguous():
                raise YardstickError(f"{name} of a packed matrix are not contiguous in memory")

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it: all that is stored."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.minima) if tensor is not None)

    def to(self, device: torch.device) -> "PackedWeight":
        minima = None if self.minima is None else self.minima.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), minima=minima)

    def rows(self, stop: int) -> "PackedWeight":
        """The first rows of each term."""

        def first(stored: torch.Tensor) -> torch.Tensor:
            return stored[:stop] if self.terms == 1 else stored.unflatten(0, (self.terms, -1))[:, :stop].flatten(0, 1)

        minima = None if self.minima is None else first(self.minima)
        return replace(self, codes=first(self.codes), scales=first(self.scales), minima=minima)

    def dequantize(self) -> torch.Tensor:
        """fp32 values [out, in]."""
        codes = unpack_nibbles(self.codes, self.in_features)
        if self.minima is None:
            signed = (codes ^ 8).to(torch.int16) - 8
            return dequantize(signed, self.scales, torch.zeros_like(self.scales), self.group_size)
        return dequantize(codes, self.scales, self.minima, self.group_size)

    @classmethod
    def pack(
        cls, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, group_size: int
    ) -> "PackedWeight":
        """From integer codes [out, in], 0..15 with minima and -8..7 without."""
        nibbles = (codes & 15).to(torch.uint8)
        return cls(pack_nibbles(nibbles).contiguous(), scales, minima, codes.shape[1], group_size)

    @classmethod
    def stack(cls, weights: Sequence["PackedWeight"]) -> "PackedWeight":
        """Matrices that read the same input as one, rows behind each other: one pass instead of several.

        Raises:
            YardstickError: they differ in columns, group size or in having minima, or have several terms.
        """
        kinds = {(w.in_features, w.group_size, w.minima is None, w.terms) for w in weights}
        if len(kinds) != 1 or weights[0].terms != 1:
            raise YardstickError("packed matrices of different columns, groups or symmetry cannot be stacked")
        first = weights[0]
        minima = None if first.minima is None else torch.cat([w.minima for w in weights])
        codes, scales = torch.cat([w.codes for w in weights]), torch.cat([w.scales for w in weights])
        return cls(codes, scales, minima, first.in_features, first.group_size)
