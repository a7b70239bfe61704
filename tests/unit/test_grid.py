import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yardstick.quantize.grid import Grid, find_range, nearest_codes, round_to_nearest
from yardstick.quantize.pack import dequantize


def quantize(weights, group_size=128, mse=False):
    codes, scales, minima = round_to_nearest(weights, Grid(group_size, mse))
    return codes, dequantize(codes, scales, minima, group_size)


def test_a_ramp_of_sixteen_levels_is_kept_exactly():
    ramp = torch.arange(16.0)[None] * 0.25 - 1.0
    codes, restored = quantize(ramp, 16)
    assert codes.tolist() == [list(range(16))]
    assert torch.equal(restored, ramp)


@pytest.mark.parametrize("value", [0.0, 0.01, -3.5, 1e-30])
def test_a_constant_group_keeps_its_value(value):
    weights = torch.full((1, 8), value)
    for mse in (False, True):
        codes, restored = quantize(weights, 8, mse)
        assert codes.unique().tolist() == [0]
        assert torch.equal(restored, weights.bfloat16().float())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_one_signed_group_spends_its_levels_inside_its_range(sign):
    weights = sign * torch.linspace(5.0, 6.0, 64)[None]
    _, restored = quantize(weights, 64)
    # half a step, plus the rounding of a minimum near 5 or 6 to bf16 (2^-6)
    assert float((restored - weights).abs().max()) < (1 / 15) / 2 + 2**-6


def test_codes_are_the_best_for_the_rounded_scale_and_minimum():
    weights = torch.randn(7, 100)
    codes, scales, minima = round_to_nearest(weights, Grid(32))
    restored = dequantize(codes, scales, minima, 32)
    for shift in (-1, 1):
        other = (codes.int() + shift).clamp(0, 15).to(torch.uint8)
        alternative = dequantize(other, scales, minima, 32)
        assert bool(((alternative - weights).abs() >= (restored - weights).abs() - 1e-6).all())


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 5.0]))
def test_range_search_is_never_worse_in_its_own_measure(seed, tail):
    weights = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    weights[:, 0] *= tail

    def error(mse):
        scale, minimum = find_range(weights, mse)
        codes = nearest_codes(weights, scale[:, None], minimum[:, None])
        return (codes * scale[:, None] + minimum[:, None] - weights).abs().pow(2.4).sum(-1)

    assert bool((error(True) <= error(False) * (1 + 1e-5)).all())


def test_range_search_shrinks_the_range_of_an_outlier():
    weights = torch.cat((torch.linspace(-1, 1, 127), torch.tensor([1.6])))[None]
    assert float(find_range(weights, True)[0]) < float(find_range(weights, False)[0])


def test_short_last_group_has_its_own_range():
    weights = torch.cat((torch.full((2, 8), 100.0), torch.tensor([[0.0, 1.0], [2.0, 4.0]])), dim=1)
    _, scales, minima = round_to_nearest(weights, Grid(8))
    assert scales.shape == (2, 2)
    assert minima[:, 1].tolist() == [0.0, 2.0]
