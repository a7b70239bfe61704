"""What each kernel computes, in plain torch: the oracle of its tests, and readable."""

import torch

from yardstick.engine.kernels.shuffled import ShuffledWeight
from yardstick.engine.weight import PackedWeight


def grouped_matmul(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Twin of `gemv` and `gemm`: sums of codes group by group, scaled, in fp32.

    Args:
        x: [texts, in].

    Returns:
        fp32 [texts, out].
    """
    columns = range(0, weight.in_features, weight.group_size)
    low, high = weight.codes & 15, weight.codes >> 4
    codes = torch.stack((low, high), dim=-1).flatten(1)[:, : weight.in_features].to(torch.int32)
    if weight.minima is None:
        codes = (codes ^ 8) - 8
    out = torch.zeros(len(x), weight.out_features, device=x.device)
    for group, start in enumerate(columns):
        inputs = x[:, start : start + weight.group_size].float()
        sums = inputs @ codes[:, start : start + weight.group_size].float().T
        out += sums * weight.scales[:, group].float()
        if weight.minima is not None:
            out += inputs.sum(dim=1, keepdim=True) * weight.minima[:, group].float()
    return out


def shuffled_matmul(x: torch.Tensor, weight: ShuffledWeight) -> torch.Tensor:
    """Twin of `shuffled_gemm`, tile by tile. Returns fp32 [texts, out]."""
    tiles, groups, rows, half = weight.codes.shape
    padded = torch.nn.functional.pad(x.float(), (0, groups * 2 * half - weight.in_features))
    out = torch.zeros(len(x), tiles * rows, device=x.device)
    for tile in range(tiles):
        for group in range(groups):
            near = padded[:, 2 * half * group : 2 * half * group + half]
            far = padded[:, 2 * half * group + half : 2 * half * (group + 1)]
            low, high = (weight.codes[tile, group] & 15).int(), (weight.codes[tile, group] >> 4).int()
            if weight.minima is None:
                low, high = (low ^ 8) - 8, (high ^ 8) - 8
            sums = (near @ low.float().T + far @ high.float().T) * weight.scales[tile, group].float()
            if weight.minima is not None:
                sums = sums + (near + far).sum(dim=1, keepdim=True) * weight.minima[tile, group].float()
            out[:, tile * rows : (tile + 1) * rows] += sums
    return out[:, : weight.out_features]
