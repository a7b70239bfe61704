"""Planted faults of layout are found and named."""

import pytest
import torch

from yardstick.sources.detective import describe, inspect_tensor, relative_error, smoothing_factors
from yardstick.sources.gguf import permute_rotary


def noisy(base, share=0.08):
    return base + share * base.norm() / base.numel() ** 0.5 * torch.randn_like(base)


def test_verdicts_by_hand():
    base = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert relative_error(base, base) == 0.0
    assert relative_error(torch.tensor([[3.0, 4.5], [0.0, 0.0]]), base) == pytest.approx(0.1)
    assert inspect_tensor(base.clone(), base).verdict == "same"
    assert inspect_tensor(torch.tensor([[3.0, 4.5], [0.0, 0.0]]), base).verdict == "quantized"
    assert inspect_tensor(torch.randn(64, 32).bfloat16().float(), torch.randn(64, 32)).verdict == "unrelated"
    weights = torch.randn(64, 32)
    assert inspect_tensor(weights.bfloat16(), weights).verdict == "rounded"
    assert inspect_tensor(torch.zeros(64, 32), weights).verdict == "unrelated"
    assert inspect_tensor(torch.ones(3), torch.ones(4)).verdict == "misshapen"


def test_a_rotary_permutation_is_found():
    base = torch.randn(96, 40)
    found = inspect_tensor(noisy(permute_rotary(base, 12)), base)  # 12 heads of 8
    assert found.verdict == "permuted" and found.error > 1
    assert found.detail.startswith("rows: in each block of 8 the order [0, 4, 1, 5, 2, 6, 3, 7]; error 0.08")


def test_an_order_of_heads_is_found_in_rows_and_in_columns():
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    rows = (order[:, None] * 24 + torch.arange(24)).flatten()
    base = torch.randn(144, 60)
    found = inspect_tensor(noisy(base[rows]), base)
    assert found.detail.startswith("rows: blocks of 24 in the order [0, 3, 1, 4, 2, 5]; error 0.0")
    found = inspect_tensor(noisy(base.T[:, rows]), base.T)
    assert found.verdict == "permuted" and found.detail.startswith(
        "columns: blocks of 24 in the order [0, 3, 1, 4, 2, 5]"
    )


def test_a_transposed_square_and_a_vector():
    base = torch.randn(48, 48)
    assert inspect_tensor(noisy(base.T), base).verdict == "transposed"
    values = torch.randn(12)
    found = inspect_tensor(values[torch.tensor([1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10])], values)
    assert found.verdict == "permuted" and "in each block of 2 the order [1, 0]" in found.detail


def test_any_other_order_is_shown():
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert describe(order).startswith(f"the order [{int(order[0])}, {int(order[1])}") and describe(order).endswith(
        "...]"
    )


@pytest.mark.parametrize("zero_centred", [False, True])
def test_smoothing_is_recovered_from_the_norm(zero_centred):
    """AWQ: the norm loses what the matrix gains; without the 1 of a zero-centred norm the factors would be wrong."""
    weights, factors = torch.randn(64, 32), torch.rand(32) * 3 + 0.3
    gain = torch.rand(32) + 0.5
    smoothed_gain = gain / factors
    base_norm, own_norm = (gain - 1, smoothed_gain - 1) if zero_centred else (gain, smoothed_gain)
    found = smoothing_factors(own_norm, base_norm, zero_centred)
    torch.testing.assert_close(found, factors, rtol=1e-4, atol=1e-5)
    finding = inspect_tensor(noisy(weights * factors, 0.05), weights, found)
    assert finding.verdict == "smoothed" and finding.error > 0.3 and finding.detail.startswith("error 0.0")
    assert smoothing_factors(base_norm, base_norm, zero_centred) is None


def test_factors_that_no_norm_tells_are_fitted():
    """Columns, rows, or both, under a little noise; a quantized matrix is not called scaled, nor is another matrix."""
    base = torch.randn(64, 48)
    columns, rows = 2.0 ** torch.linspace(-1, 1, 48), 2.0 ** torch.linspace(-2, 0, 64)[:, None]
    noisy = base + 0.05 * torch.randn(64, 48)
    for candidate, sides in (
        (noisy * columns, "0.5 to 2 of its columns"),
        (noisy * rows, "0.25 to 1 of its rows"),
        (noisy * columns * rows, "of its columns and"),
    ):
        found = inspect_tensor(candidate, base)
        assert found.verdict == "scaled"
        assert 0.03 < float(found.detail.split()[1]) < 0.06
        low, high = (float(x) for x in found.detail.split("factors ")[1].split(" of its")[0].split(" to "))
        if "and" not in sides:
            expected = [float(x) for x in sides.split(" of")[0].split(" to ")]
            assert low == pytest.approx(expected[0], rel=0.1) and high == pytest.approx(expected[1], rel=0.1)
        assert sides.partition(" of ")[2] in found.detail
    assert inspect_tensor(noisy, base).verdict == "quantized"
    assert inspect_tensor(torch.randn(64, 48), base).verdict == "unrelated"
    assert inspect_tensor(-base, base).verdict == "unrelated"
    assert inspect_tensor(base[:1] * columns, base[:1]).verdict != "scaled"  # one row fits anything


def test_zero_points_that_are_one_off_are_a_shift():
    base, steps = torch.randn(24, 96), torch.rand(24, 3) * 0.2 + 0.3
    steps = steps.repeat_interleave(32, dim=1)
    codes = (base / steps).round() + 8
    assert inspect_tensor((codes - 8) * steps, base).verdict == "quantized"
    found = inspect_tensor((codes - 7) * steps, base)
    assert found.verdict == "shifted" and "are zero points one off?" in found.detail
    assert float(found.detail.split()[1]) == pytest.approx(0.115, abs=0.02)  # a step of 0.4 over sqrt(12)
