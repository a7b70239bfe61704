import pytest
import torch

from yardstick.errors import YardstickError
from yardstick.quantize.gptq import gptq, output_error
from yardstick.quantize.grid import Grid, find_range, nearest_codes, round_to_nearest
from yardstick.quantize.hessian import Hessian, inverse_factor
from yardstick.quantize.pack import dequantize


def correlated_hessian(features: int, tokens: int = 600) -> torch.Tensor:
    mixing = torch.randn(features, features) * torch.logspace(0, -2, features)
    inputs = torch.randn(tokens, features) @ mixing
    return inputs.T @ inputs / tokens


def restore(result, group_size):
    return dequantize(result.codes, result.scales, result.minima, group_size)


def textbook_gptq(weights, hessian, group_size, damping, order=None):
    """GPTQ by its definition: after each column, invert the Hessian of the columns that are left. fp64, one by one.

    With an order, columns are walked in it, and ranges come from the original weights of each column's own group.
    """
    original, steps = weights, torch.arange(weights.shape[1]) if order is None else order
    weights, hessian = weights.double().clone(), hessian.double().clone()
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    codes = torch.zeros(weights.shape, dtype=torch.uint8)
    for done, column in enumerate(steps.tolist()):
        group = slice(column // group_size * group_size, (column // group_size + 1) * group_size)
        if order is not None:
            scale, minimum = find_range(original[:, group])
        elif column % group_size == 0:
            scale, minimum = find_range(weights[:, group].float())
        left = steps[done:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        chosen = nearest_codes(weights[:, column].float(), scale, minimum)
        codes[:, column] = chosen.to(torch.uint8)
        error = (weights[:, column] - (chosen * scale + minimum).double()) / inverse[0, 0]
        weights[:, left[1:]] -= error[:, None] * inverse[0, 1:][None]
    return codes


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 128])
def test_identity_hessian_gives_round_to_nearest_code_for_code(act_order, group_size):
    weights = torch.randn(24, 200)
    result = gptq(weights, torch.eye(200), Grid(group_size), act_order, 0.01, "w")
    codes, scales, minima = round_to_nearest(weights, Grid(group_size))
    assert torch.equal(result.codes, codes)
    assert torch.equal(result.scales, scales) and torch.equal(result.minima, minima)


@pytest.mark.parametrize("group_size", [8, 32, 48, 96, 300])
def test_agrees_with_the_definition(group_size):
    """96 and 300 cross the block of 128 columns: a group's range must see every error before it."""
    weights, hessian = torch.randn(16, 330), correlated_hessian(330)
    ours = gptq(weights, hessian, Grid(group_size), False, 0.01, "w").codes
    agreement = (ours == textbook_gptq(weights, hessian, group_size, 0.01)).float().mean()
    assert float(agreement) > 0.995  # fp32 against fp64: a tie may fall either way, and moves what follows


@pytest.mark.parametrize("act_order", [False, True])
def test_output_error_falls_while_weight_error_rises(act_order):
    weights, hessian = torch.randn(32, 160), correlated_hessian(160)
    result = restore(gptq(weights, hessian, Grid(64), act_order, 0.01, "w"), 64)
    nearest = dequantize(*round_to_nearest(weights, Grid(64)), 64)
    assert output_error(weights, result, hessian) < 0.7 * output_error(weights, nearest, hessian)
    assert float((weights - result).square().sum()) > float((weights - nearest).square().sum())


def test_act_order_keeps_columns_and_groups_in_place():
    """A diagonal Hessian spreads no error, so any order of the walk must give round-to-nearest, code for code."""
    weights = torch.randn(8, 100) * torch.repeat_interleave(torch.tensor([1.0, 10.0, 0.1, 3.0]), 32)[:100]
    result = gptq(weights, torch.diag(torch.rand(100) + 0.1), Grid(32), True, 0.01, "w")
    codes, scales, minima = round_to_nearest(weights, Grid(32))
    assert torch.equal(result.codes, codes)
    assert torch.equal(result.scales, scales) and torch.equal(result.minima, minima)


def test_act_order_agrees_with_the_definition_on_permuted_columns():
    weights, hessian = torch.randn(16, 200), correlated_hessian(200)
    order = torch.argsort(hessian.diagonal(), descending=True)
    ours = gptq(weights, hessian, Grid(64), True, 0.01, "w").codes
    theirs = textbook_gptq(weights, hessian, 64, 0.01, order)
    assert float((ours == theirs).float().mean()) > 0.995


def test_dead_column_is_rounded_not_zeroed():
    weights, hessian = torch.randn(4, 16), torch.eye(16)
    hessian[2, 2] = 0.0
    result = restore(gptq(weights, hessian, Grid(16), False, 0.01, "w"), 16)
    nearest = dequantize(*round_to_nearest(weights, Grid(16)), 16)
    assert torch.equal(result[:, 2], nearest[:, 2])
    assert bool((result[:, 2] != 0).any())


def test_diagonal_with_a_zero_factors():
    factor, damping = inverse_factor(torch.diag(torch.tensor([1.0, 0.0])), 0.01, "w")
    assert damping == 0.01 and bool(torch.isfinite(factor).all())


def test_damping_is_raised_until_the_hessian_is_positive_definite():
    hessian = torch.tensor([[1.0, 1.05], [1.05, 1.0]])
    _, damping = inverse_factor(hessian, 0.01, "w")
    assert damping == pytest.approx(0.1)
    with pytest.raises(YardstickError, match="blk: the Hessian is not positive definite even with damping 1"):
        inverse_factor(torch.tensor([[1.0, 5.0], [5.0, 1.0]]), 0.01, "blk")


def test_hessians_that_cannot_be_used_are_refused_by_name():
    with pytest.raises(YardstickError, match="q_proj: no calibration token"):
        Hessian(4).mean("q_proj")
    zero, nan = Hessian(4), Hessian(4)
    zero.add(torch.zeros(3, 4))
    with pytest.raises(YardstickError, match="q_proj: the Hessian is zero"):
        zero.mean("q_proj")
    nan.add(torch.tensor([[1.0, float("nan"), 0.0, 0.0]]))
    with pytest.raises(YardstickError, match="q_proj: the Hessian is not finite"):
        nan.mean("q_proj")


def test_hessian_is_the_mean_outer_product():
    inputs = torch.randn(2, 5, 3)
    hessian = Hessian(3)
    hessian.add(inputs[:1])
    hessian.add(inputs[1:])
    expected = sum(torch.outer(x, x) for x in inputs.reshape(-1, 3)) / 10
    torch.testing.assert_close(hessian.mean("w"), expected)
