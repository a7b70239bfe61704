import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yardstick.quantize.pack import dequantize, group_count, pack_nibbles, unpack_nibbles


def test_element_2j_is_the_low_nibble_of_byte_j():
    codes = torch.tensor([[1, 2, 15, 0, 7]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F, 0x07]]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 70), st.integers(0, 2**31))
def test_unpack_inverts_pack(rows, columns, seed):
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_nibbles(codes)
    assert packed.shape == (rows, (columns + 1) // 2)
    assert torch.equal(unpack_nibbles(packed, columns), codes)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(2, 17), st.integers(0, 2**31))
def test_dequantize_is_the_contract_element_by_element(rows, columns, group_size, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    groups = group_count(columns, group_size)
    scales = torch.randn(rows, groups, generator=generator).bfloat16()
    minima = torch.randn(rows, groups, generator=generator).bfloat16()
    weights = dequantize(codes, scales, minima, group_size)
    for row in range(rows):
        for column in range(columns):
            scale, minimum = scales[row, column // group_size].float(), minima[row, column // group_size].float()
            assert weights[row, column] == codes[row, column].float() * scale + minimum


def test_ten_columns_in_groups_of_four_have_three_scales():
    assert group_count(10, 4) == 3
