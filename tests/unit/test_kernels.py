"""Every kernel against its twin, and the twins against the definition, interpreted where there is no GPU."""

import pytest
import torch

from yardstick.engine.kernels.gemm import gemm
from yardstick.engine.kernels.gemv import gemv
from yardstick.engine.kernels.shuffled import shuffle, shuffled_gemm, unshuffle
from yardstick.engine.kernels.twins import grouped_matmul, shuffled_matmul
from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError
from yardstick.models.prefill import pick_device

# out, in, group: short last groups, an odd width, a width below one group, sizes that no tile divides
SHAPES = [(70, 200, 32), (33, 577, 64), (131, 448, 128), (5, 31, 32), (17, 1536, 128), (64, 256, 256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUND = 1e-5  # fp32 sums in another order


def packed(out_features: int, in_features: int, group_size: int, symmetric: bool = False) -> PackedWeight:
    groups = -(-in_features // group_size)
    scales = (0.5 + torch.rand(out_features, groups)).mul(0.01).bfloat16()
    low, high = (-8, 8) if symmetric else (0, 16)
    codes = torch.randint(low, high, (out_features, in_features))
    minima = None if symmetric else (-8 * scales.float() * (0.5 + torch.rand(scales.shape))).bfloat16()
    return PackedWeight.pack(codes, scales, minima, group_size).to(pick_device())


def inputs(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """With a mean that is not zero, so that the minima weigh in."""
    return (torch.randn(rows, columns) + 0.3).to(pick_device(), dtype)


def poisoned(monkeypatch) -> None:
    """New memory holds NaN: what a kernel does not write shows."""
    plain = torch.Tensor.new_empty

    def with_nan(self, *args, **named) -> torch.Tensor:
        new = plain(self, *args, **named)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch.Tensor, "new_empty", with_nan)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == torch.float32
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_twins_are_the_definition(shape, symmetric):
    weight, x = packed(*shape, symmetric), inputs(3, shape[1], torch.float32)
    expected = (x.double() @ weight.dequantize().double().T).float()
    assert error(grouped_matmul(x, weight), expected) < 1e-6
    assert error(shuffled_matmul(x, shuffle(weight, 16)), expected) < 1e-6


def test_values_worked_by_hand():
    """Codes 1, 2, 3 and 15 in groups of two with scales 0.5 and 2, minima -1 and 3: weights -0.5, 0, 9, 33."""
    scales, minima = torch.tensor([[0.5, 2.0]]).bfloat16(), torch.tensor([[-1.0, 3.0]]).bfloat16()
    weight = PackedWeight.pack(torch.tensor([[1, 2, 3, 15]]), scales, minima, 2).to(pick_device())
    assert weight.codes.tolist() == [[0x21, 0xF3]] and weight.nbytes == 2 + 4 + 4
    assert weight.dequantize().tolist() == [[-0.5, 0.0, 9.0, 33.0]]
    x = torch.tensor([[2.0, 5.0, 1.0, -1.0]], device=pick_device())
    assert gemv(x, weight, 2, 2).tolist() == [[-1.0 + 9.0 - 33.0]]
    signed = PackedWeight.pack(torch.tensor([[-8, 7, -1, 3]]), scales, None, 2).to(pick_device())
    assert signed.codes.tolist() == [[0x78, 0x3F]]  # -8 is 8, -1 is 15: two's complement
    assert signed.dequantize().tolist() == [[-4.0, 3.5, -2.0, 6.0]]
    assert gemv(x, signed, 2, 2).tolist() == [[-8.0 + 17.5 - 2.0 - 6.0]]


def check(kernel, twin, x: torch.Tensor, weight, monkeypatch) -> None:
    expected = twin(x, weight)
    with monkeypatch.context() as patch:
        poisoned(patch)
        assert error(kernel(x, weight), expected) < BOUND


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gemv_is_its_twin(shape, symmetric, monkeypatch):
    weight = packed(*shape, symmetric)
    for dtype, (rows, groups, splits) in zip(DTYPES, ((16, 1, 1), (8, 2, 3), (32, 4, 2)), strict=True):
        x = inputs(1, shape[1], dtype)
        check(lambda x, w, t=(rows, groups, splits): gemv(x, w, *t), grouped_matmul, x, weight, monkeypatch)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gemm_is_its_twin(shape, symmetric, monkeypatch):
    weight = packed(*shape, symmetric)
    tiles = [(1, 16, 16, 1), (2, 16, 64, 2), (19, 16, 32, 1), (64, 64, 32, 3)]
    for dtype, (texts, batch, rows, splits) in zip([*DTYPES, DTYPES[1]], tiles, strict=True):
        x = inputs(texts, shape[1], dtype)
        check(lambda x, w, t=(batch, rows, splits): gemm(x, w, *t), grouped_matmul, x, weight, monkeypatch)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shuffled_gemm_is_its_twin(shape, symmetric, monkeypatch):
    weight = packed(*shape, symmetric)
    for dtype, (texts, batch, rows, splits) in zip(
        DTYPES, ((1, 16, 16, 1), (7, 16, 64, 2), (64, 32, 32, 3)), strict=True
    ):
        x = inputs(texts, shape[1], dtype)
        check(
            lambda x, w, t=(batch, splits): shuffled_gemm(x, w, *t),
            shuffled_matmul,
            x,
            shuffle(weight, rows),
            monkeypatch,
        )


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_shuffling_is_undone_to_the_bit(shape, rows, symmetric):
    weight = packed(*shape, symmetric)
    again = unshuffle(shuffle(weight, rows))
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.scales, weight.scales)
    assert symmetric or torch.equal(again.minima, weight.minima)
    assert (again.in_features, again.group_size) == (weight.in_features, weight.group_size)


def test_stacked_matrices_are_each_by_itself():
    weights = [packed(rows, 200, 32) for rows in (7, 20, 3)]
    x = inputs(1, 200, torch.float32)
    together = gemv(x, PackedWeight.stack(weights), 16, 2)
    expected = torch.cat([grouped_matmul(x, weight) for weight in weights], dim=1)
    assert error(together, expected) < BOUND
    with pytest.raises(YardstickError, match="cannot be stacked"):
        PackedWeight.stack([packed(4, 64, 32), packed(4, 64, 64)])


def test_parts_that_do_not_fit_are_refused():
    good = packed(6, 70, 32)
    with pytest.raises(YardstickError, match="codes of a packed matrix"):
        PackedWeight(good.codes[:, :-1].contiguous(), good.scales, good.minima, 70, 32)
    with pytest.raises(YardstickError, match="scales of a packed matrix"):
        PackedWeight(good.codes, good.scales.float(), good.minima, 70, 32)
    with pytest.raises(YardstickError, match="not contiguous"):
        PackedWeight(good.codes.T.contiguous().T, good.scales, good.minima, 70, 32)
