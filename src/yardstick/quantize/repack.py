"""Take a checkpoint of 4-bit integers over into the packing contract, code by code.

    (code - zero) * scale = code * scale + minimum,  minimum = -zero * scale

Nothing is rounded but scale and minimum, to bf16. Where both are exact in it, so is every weight: a symmetric
checkpoint with bf16 scales loses nothing. An fp16 scale has 11 bits where bf16 has 8, and zero * scale may have up to
four more than the scale.
"""

import math

import torch

from yardstick.errors import YardstickError
from yardstick.progress import progress
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.pack import dequantize
from yardstick.sources.base import TensorSource
from yardstick.sources.hf import PLAIN
from yardstick.sources.integers import Integers

BLOCK = 1 << 17  # weights compared at a time
TOLERANCE = 1e-6  # of an error that is computed twice


def repack_model(source: TensorSource, shards: dict[str, list[str]], writer: PackedWriter, exact: bool) -> None:
    """Write all shards. Each matrix of integers leaves a report in the checkpoint; the rest is stored as it was.

    Raises:
        YardstickError: a quantized tensor is not of 4-bit integers, or with `exact` would not keep its values.
    """
    names = [name for names in shards.values() for name in names]
    for name in names:  # before hours of work
        scheme = source.infos()[name].scheme
        if not is_plain(source, name) and "int4" not in scheme:
            raise YardstickError(f"{source.path}: tensor {name} is stored as {scheme}, not as 4-bit integers")
    with progress("repack", len(shards), "shard") as done:
        for shard, names in shards.items():
            if not writer.has_shard(shard):
                for name in names:
                    if is_plain(source, name):
                        writer.add_plain(name, source.get(name))
                        continue
                    stored = source.integers(name)
                    codes, scales, minima = to_packing(stored)
                    report = change_report(stored, scales, minima)
                    if exact and report["inexact_groups"]:
                        raise YardstickError(
                            f"{source.path}: tensor {name} is not exact in bf16: scale or minimum of "
                            f"{report['inexact_groups']} of {report['groups']} groups would be rounded"
                        )
                    writer.add_quantized(name, codes, scales, minima, stored.group_size, report)
                writer.finish_shard(shard)
            done(1)


def is_plain(source: TensorSource, name: str) -> bool:
    """Whether a tensor is stored as ordinary floats."""
    return source.infos()[name].scheme.upper() in PLAIN


def to_packing(stored: Integers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [out, in], scales and minima bf16 [out, groups] of the contract.

    The minimum is that of the rounded scale, so that a code at its zero point stays near 0.
    """
    scales = stored.scales.bfloat16()
    return stored.codes, scales, ((0 - stored.zeros.float()) * scales.float()).bfloat16()


def change_report(stored: Integers, scales: torch.Tensor, minima: torch.Tensor) -> dict:
    """What bf16 costs: groups whose scale or minimum is inexact; the greatest change of a weight as a share of the
    greatest weight of its group (of one scale where all of them are 0); the relative error of the tensor."""
    wide = stored.scales.double()
    inexact = (scales.double() != wide) | (minima.double() != (0 - stored.zeros.double()) * wide)
    report = {"group_size": stored.group_size, "groups": inexact.numel(), "inexact_groups": int(inexact.sum())}
    if not report["inexact_groups"]:
        return report | {"greatest_change": 0.0, "relative_error": 0.0}
    size, greatest, sums = stored.group_size, 0.0, [0.0, 0.0]
    for part in row_blocks(*stored.codes.shape):
        theirs = decode(stored, part)
        ours = dequantize(stored.codes[part], scales[part], minima[part], size)
        add_squares(sums, theirs, ours)
        unit = torch.maximum(group_maximum(theirs, size), stored.scales[part].abs())
        change = group_maximum(ours - theirs, size) / torch.where(unit == 0, 1, unit)
        greatest = max(greatest, float(change.max()))
    return report | {"greatest_change": greatest, "relative_error": relative_error(sums)}


def decode(stored: Integers, rows: slice) -> torch.Tensor:
    """fp32 weights of some rows, as the format defines them."""
    zeros, scales = stored.zeros[rows].float(), stored.scales[rows]
    steps = dequantize(stored.codes[rows], torch.ones_like(zeros), -zeros, stored.group_size)  # code - zero
    return dequantize(steps, scales, torch.zeros_like(scales), stored.group_size)


def group_maximum(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Greatest magnitude in each group, [rows, groups]."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.shape[1] % group_size))
    return padded.unflatten(1, (-1, group_size)).amax(-1)


def row_blocks(rows: int, columns: int) -> list[slice]:
    """All rows, as many at a time as stay in cache."""
    step = max(BLOCK // columns, 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def add_squares(sums: list[float], theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """Add the squares of the change and of the values to `sums`."""
    sums[0] += float((ours.float() - theirs.float()).square_().sum(dtype=torch.float64))
    sums[1] += float(theirs.float().square().sum(dtype=torch.float64))


def relative_error(sums: list[float]) -> float:
    """|change| / |values| of sums of squares; 0 where there is no change."""
    return math.sqrt(sums[0] / sums[1]) if sums[0] and sums[1] else float(sums[0] > 0)


def check_read_back(source: TensorSource, packed: TensorSource, names: list[str], reports: list[dict]) -> None:
    """Compare what the new checkpoint gives with what the old one gives, through the reader of each.

    Raises:
        YardstickError: a tensor without inexact groups is not the same, bit for bit, or another has another error
            than was reported.
    """
    expected = {report["name"]: report["relative_error"] for report in reports}
    with progress("read back", len(names), "tensor") as done:
        for name in names:
            theirs, ours, sums, same = source.rows(name), packed.rows(name), [0.0, 0.0], True
            shape = source.infos()[name].shape
            for part in row_blocks(shape[0], max(math.prod(shape[1:]), 1)):
                old, new = theirs[part], ours[part]
                same = same and old.dtype == new.dtype and torch.equal(old, new)
                add_squares(sums, old, new)
            error = expected.get(name, 0.0)
            if not same if error == 0 else abs(relative_error(sums) - error) > TOLERANCE * error:
                raise YardstickError(f"{packed.path}: tensor {name} is not read back as it was; delete the folder")
            done(1)
