"""llama.cpp's importance matrix: for each matrix, the mean square of each input column over calibration text.

Computed with our forward and stored in llama.cpp's own GGUF form (sums and counts), so that its tools read it too.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from yardstick.errors import YardstickError
from yardstick.files import atomic_path
from yardstick.models.config import ModelConfig
from yardstick.models.layers import run_block
from yardstick.models.parts import rotary_table
from yardstick.models.prefill import embed, layers_ahead, pick_device
from yardstick.sources.base import TensorSource
from yardstick.sources.gguf import gguf_name
from yardstick.sources.gguf_file import GgufFile


def column_square_sums(
    source: TensorSource,
    config: ModelConfig,
    input_ids: torch.Tensor,
    batch: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> dict[str, torch.Tensor]:
    """Sum of squares of each input column of every body matrix, fp32 [in], by Hugging Face name."""
    device, dtype = pick_device(), torch.float32
    hidden = embed(source, config, input_ids, dtype, device)
    rotary = rotary_table(config, input_ids.shape[1], device, dtype)
    shapes = config.tensors()
    # taken before the layers: small tensors that stay, laid between large ones that go, keep the heap from shrinking
    sums = {name: torch.zeros(shapes[name][1], device=device) for name in config.body_matrices()}
    for layer, weights in layers_ahead(source, config, dtype, device):

        def add_squares(names: tuple[str, ...], inputs: torch.Tensor, layer: int = layer) -> None:
            squares = inputs.flatten(0, 1).square().sum(dim=0)
            for name in names:
                sums[config.layer_name(layer, f"{name}.weight")] += squares

        for start in range(0, len(hidden), batch):
            rows = slice(start, start + batch)
            kind = config.layer_kind(layer)
            hidden[rows] = run_block(hidden[rows], weights, config, kind, rotary, on_stage=add_squares)
            on_tokens(hidden[rows].shape[0] * input_ids.shape[1])
    return sums


def write_imatrix(path: Path, sums: dict[str, torch.Tensor], tokens: int, chunk_size: int, dataset: str) -> None:
    """Write the GGUF form: `<tensor>.in_sum2` [1, in] and `<tensor>.counts` [1, 1], both fp32.

    Raises:
        YardstickError: a column is not finite.
    """
    from gguf import GGUFWriter

    with atomic_path(path) as temporary:
        writer = GGUFWriter(temporary, arch="")
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [dataset])
        writer.add_uint32("imatrix.chunk_count", tokens // chunk_size)
        writer.add_uint32("imatrix.chunk_size", chunk_size)
        for name, values in sums.items():
            if not bool(torch.isfinite(values).all()):
                raise YardstickError(f"imatrix: the inputs of {name} are not finite on the calibration text")
            writer.add_tensor(f"{gguf_name(name)}.in_sum2", values.cpu().numpy().reshape(1, -1))
            writer.add_tensor(f"{gguf_name(name)}.counts", np.full((1, 1), tokens, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Mean squares fp32 [in] by GGUF tensor name.

    Raises:
        YardstickError: not an imatrix, a sum without its count, or a matrix that saw no token.
    """
    tensors = GgufFile(path).tensors
    means = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part == "counts":
            continue
        counts = tensors.get(f"{stem}.counts")
        if part != "in_sum2" or counts is None or tensor.kind.name != "F32" or counts.kind.name != "F32":
            raise YardstickError(f"{path}: tensor {name} is not part of an importance matrix")
        count = counts.data.view(np.float32)
        if count.size != 1 or count[0] <= 0:
            raise YardstickError(f"{path}: {stem} saw no calibration token, or is split by experts")
        means[stem] = tensor.data.view(np.float32) / count[0]
    return means
