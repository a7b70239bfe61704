import math

import pytest
import torch

from yardstick.sources.float_formats import decode_e2m1, decode_e8m0, decode_fp8


def test_all_fp4_codes():
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8).reshape(2, 8))
    assert values.dtype == torch.float32
    assert values[0].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values[1].tolist() == [0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert torch.signbit(values[1]).all()


def test_scales_of_eight_exponent_bits():
    """Fault B14: byte 0 is not zero, byte 255 is not finite, and 2^byte is not a scale."""
    scales = decode_e8m0(torch.tensor([[0, 1, 127], [128, 254, 255]], dtype=torch.uint8))
    assert scales.dtype == torch.float32
    assert scales[0].tolist() == [2.0**-127, 2.0**-126, 1.0]
    assert scales[1, :2].tolist() == [2.0, 2.0**127] and scales[1, 2].isnan()


def test_every_finite_scale_is_a_power_of_two():
    scales = torch.arange(255, dtype=torch.uint8)
    assert decode_e8m0(scales).tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert torch.equal(decode_e8m0(scales.view(torch.float8_e8m0fnu)), decode_e8m0(scales))


@pytest.mark.parametrize(
    ("kind", "mantissa_bits", "bias", "dtype"),
    [("F8_E4M3", 3, 7, torch.float8_e4m3fn), ("F8_E5M2", 2, 15, torch.float8_e5m2)],
)
def test_all_fp8_codes(kind, mantissa_bits, bias, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_fp8(codes, kind)
    assert torch.equal(decode_fp8(codes.view(dtype), kind).nan_to_num(), values.nan_to_num())
    for code, value in enumerate(values.tolist()):
        exponent, mantissa = (code & 127) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        sign = -1.0 if code & 128 else 1.0
        if kind == "F8_E4M3" and code & 127 == 127:
            assert math.isnan(value)
        elif kind == "F8_E5M2" and exponent == 31:
            assert math.isnan(value) if mantissa else value == sign * math.inf
        else:
            fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
            assert value == sign * fraction * 2.0 ** (max(exponent, 1) - bias)
