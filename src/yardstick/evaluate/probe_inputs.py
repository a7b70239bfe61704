"""What the original's matrices read: the input of each stage of its forward, on some positions of held-out text."""

from collections.abc import Iterator

import torch

from yardstick.models.config import ModelConfig
from yardstick.models.layers import block_stages, run_block
from yardstick.models.parts import norm, rotary_table
from yardstick.models.prefill import embed, layers_ahead, pick_device
from yardstick.sources.base import TensorSource, require_finite

HEAD = "lm_head.weight"  # the output head under one name, tied or not


def first_positions(corpora: list[str], length: int, positions: int) -> list[tuple[int, int]]:
    """(window, positions from its start) of the windows to run, for about `positions` positions in all.

    Each corpus gives the same number, `positions` over the number of corpora rounded up, from the start of its first
    window on; one that has fewer gives all it has. `corpora` names the corpus of each window of `length` positions.
    """
    names = list(dict.fromkeys(corpora))
    share = -(-positions // len(names))
    taken = []
    for name in names:
        left = share
        for window in (i for i, corpus in enumerate(corpora) if corpus == name):
            if left > 0:
                taken.append((window, min(left, length)))
                left -= length
    return taken


def stage_inputs(
    source: TensorSource,
    config: ModelConfig,
    input_ids: torch.Tensor,
    counts: list[int],
    dtype: torch.dtype,
    batch_chunks: int,
    first: bool = False,
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """(full names of the matrices that share an input, the input [positions, in]) of each stage, the head's last.

    Row i of `input_ids` [windows, length] counts with its first `counts[i]` positions; what comes later in a window
    changes nothing before it. With `first` only the stage that needs no matrix before it: the first layer's, on the
    normed embedding.

    Raises:
        YardstickError: an input is not finite.
    """
    device = pick_device()
    hidden = embed(source, config, input_ids, dtype, device)
    rotary = rotary_table(config, input_ids.shape[1], device, dtype)
    batches = [slice(start, start + batch_chunks) for start in range(0, len(hidden), batch_chunks)]
    if first:
        name = "input_layernorm.weight"
        weights = {name: source.get(config.layer_name(0, name)).to(device=device, dtype=dtype)}
        matrices, inputs = next(block_stages(hidden, weights, config, config.layer_kind(0), rotary))
        yield _stage([config.layer_name(0, f"{matrix}.weight") for matrix in matrices], [_counted(inputs, counts)])
        return
    for layer, weights in layers_ahead(source, config, dtype, device):
        parts: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for rows in batches:

            def keep(matrices, inputs, counts=counts[rows], parts=parts):
                parts.setdefault(matrices, []).append(_counted(inputs, counts))

            hidden[rows] = run_block(hidden[rows], weights, config, config.layer_kind(layer), rotary, on_stage=keep)
        for matrices, pieces in parts.items():
            yield _stage([config.layer_name(layer, f"{matrix}.weight") for matrix in matrices], pieces)
    gain = source.get(config.final_norm_name).to(device=device, dtype=dtype)
    yield _stage([HEAD], [_counted(norm(hidden[rows], gain, config), counts[rows]) for rows in batches])


def _counted(inputs: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Positions [positions, in] of inputs [windows, length, in] that count."""
    return torch.cat([row[:count] for row, count in zip(inputs, counts, strict=True)]).cpu()


def _stage(names: list[str], pieces: list[torch.Tensor]) -> tuple[list[str], torch.Tensor]:
    inputs = torch.cat(pieces)
    require_finite(inputs, f"probe: the original's input of {names[0]}")
    return names, inputs
