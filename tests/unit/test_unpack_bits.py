"""Codes of 2, 3, 4 and 8 bits in int32 words, against a packer that sets one bit at a time."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from yardstick.sources.folder import unpack_bits


def pack_stream(codes, bits: int) -> list[int]:
    """int32 words of one row of codes: bit k of code i is bit (bits * i + k) % 32 of word (bits * i + k) // 32."""
    words = [0] * -(-len(codes) * bits // 32)
    for i, code in enumerate(codes):
        for k in range(bits):
            position = bits * i + k
            words[position // 32] |= (int(code) >> k & 1) << position % 32
    return [word - (1 << 32) if word >> 31 else word for word in words]


def pack(codes: np.ndarray, bits: int, axis: int) -> torch.Tensor:
    """int32 words of a matrix of codes, packed along one axis; a last word that is not full is padded with zeros."""
    rows = [pack_stream(row, bits) for row in (codes if axis == 1 else codes.T)]
    words = torch.tensor(rows, dtype=torch.int32)
    return words if axis == 1 else words.T.contiguous()


def test_words_worked_out_on_paper():
    assert pack_stream(range(8), 4) == [0x76543210]
    assert unpack_bits(torch.tensor([0x76543210], dtype=torch.int32), 4).tolist() == list(range(8))
    # the sign bit is an ordinary bit: 0xFEDCBA98
    assert unpack_bits(torch.tensor([0xFEDCBA98 - (1 << 32)], dtype=torch.int32), 4).tolist() == list(range(8, 16))
    assert unpack_bits(torch.tensor([0b11100100], dtype=torch.int32), 2)[:5].tolist() == [0, 1, 2, 3, 0]
    assert unpack_bits(torch.tensor([-2], dtype=torch.int32), 8).tolist() == [254, 255, 255, 255]


def test_three_bits_cross_words():
    """Code 10 has two bits in word 0 and one in word 1; code 21 one bit in word 1 and two in word 2."""
    codes = [0] * 32
    codes[10], codes[21] = 0b110, 0b101
    words = [0b10 << 30, 0b1 | 1 << 31, 0b10]
    words = [word - (1 << 32) if word >> 31 else word for word in words]
    assert pack_stream(codes, 3) == words
    assert unpack_bits(torch.tensor(words, dtype=torch.int32), 3).tolist() == codes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 70),
    st.integers(1, 4),
    st.sampled_from([0, 1]),
    st.integers(0, 2**32 - 1),
)
def test_unpacking_undoes_the_packer_and_agrees_with_compressed_tensors(bits, count, rows, axis, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count) if axis else (count, rows))
    words = pack(codes, bits, axis)
    found = unpack_bits(words, bits, dim=axis)
    assert found.dtype == torch.int32
    assert torch.equal(found.narrow(axis, 0, count), torch.from_numpy(codes).int())
    theirs = unpack_from_int32(words, bits, torch.Size(codes.shape), packed_dim=axis)
    assert np.array_equal(theirs.int().numpy() + (1 << bits - 1), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_more_dimensions_keep_their_places(bits):
    codes = np.random.default_rng(1).integers(0, 1 << bits, (3, 32, 2))
    words = torch.stack([pack(plane, bits, axis=0) for plane in codes])
    assert torch.equal(unpack_bits(words, bits, dim=1), torch.from_numpy(codes).int())
    assert torch.equal(unpack_bits(words, bits, dim=-2), torch.from_numpy(codes).int())
