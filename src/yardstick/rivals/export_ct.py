"""Export a packed checkpoint as compressed-tensors `pack-quantized`, int4 with integer zero points.

    w[o, i] = (code - zero) * scale        instead of        code * scale + minimum

The scale is kept, the zero point is round(-minimum / scale) in 0..15, and codes move only where that had to be clipped.
A group of scale 0 is one value v, which is one step of |v|: nothing is lost there. What the rest loses is reported for
each matrix. A row that is one group is written with the strategy `channel`.

What such a file cannot be read from is refused: groups that do not divide a row, which compressed-tensors has no layout
for, and matrices that vLLM joins (query, key and value; gate and up) in different schemes.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig
from yardstick.quantize.pack import LEVELS, dequantize, group_count, pack_nibbles, unpack_nibbles
from yardstick.quantize.repack import add_squares, relative_error, row_blocks
from yardstick.sources.base import TensorInfo
from yardstick.sources.packed import CODES, MINIMA, SCALES
from yardstick.sources.safetensors_file import SafetensorsReader

VERSION = "0.19.0"  # of the library that the layout is tested against
JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
)
NOT_OURS = ["re:.*visual.*", "re:mtp.*"]  # modules of a vision checkpoint that stay as they are


@dataclass
class Exported:
    """Stored tensors of one matrix, and what they lost: [squares of the change, squares of the weights]."""

    tensors: dict[str, torch.Tensor]
    report: dict
    sums: list[float]


def one_group(scheme: dict) -> bool:
    """Whether a row is one group."""
    return group_count(scheme["shape"][1], scheme["group_size"]) == 1


def require_loadable(folder: Path, schemes: dict[str, dict], config: ModelConfig) -> None:
    """Refuse what transformers or vLLM could not load.

    Raises:
        YardstickError: names the tensor.
    """
    if not schemes:
        raise YardstickError(f"{folder}: holds no quantized tensor")
    for name, scheme in schemes.items():
        (_, width), size = scheme["shape"], scheme["group_size"]
        if scheme.get("terms", 1) > 1:
            raise YardstickError(f"{folder}: tensor {name} is a sum of terms, which compressed-tensors does not have")
        if width % size and not one_group(scheme):
            raise YardstickError(
                f"{folder}: tensor {name} has rows of {width} in groups of {size}, but compressed-tensors has no short "
                "groups"
            )
    for layer in range(config.num_layers):
        for parts in JOINED:
            names = [config.layer_name(layer, f"{part}.weight") for part in parts]
            names = [name for name in names if name in config.tensors()]
            found = {group_arguments(schemes[name]) if name in schemes else None for name in names}
            if len(found) > 1:
                raise YardstickError(
                    f"{folder}: tensors {', '.join(names)} are stored in different schemes, but vLLM joins them"
                )


def group_arguments(scheme: dict) -> tuple[str, int | None]:
    """Strategy and group size."""
    return ("channel", None) if one_group(scheme) else ("group", scheme["group_size"])


def quantization_config(
    schemes: dict[str, dict], infos: dict[str, TensorInfo], config: ModelConfig, wrapped: bool
) -> dict:
    """The `quantization_config` that describes these matrices; the other Linear modules of the model are ignored.
    `wrapped` says that the model is part of a larger one, a vision checkpoint.

    With one scheme its target is the class Linear, and the head by its name, which some readers ask for. With several,
    each names its modules: vLLM looks for the class first where it has joined modules.
    """

    def pattern(name: str) -> str:
        module = name.removesuffix(".weight")
        # transformers has a second class for such a checkpoint, without the part of the prefix that wraps
        return f"re:.*{re.escape(module.removeprefix(config.prefix))}$" if wrapped else module

    modules: dict[tuple, list[str]] = {}
    for name, scheme in schemes.items():
        modules.setdefault(group_arguments(scheme), []).append(pattern(name))
    groups = {}
    for number, (arguments, names) in enumerate(modules.items()):
        head = [pattern("lm_head")] if "lm_head.weight" in schemes else []
        groups[f"group_{number}"] = {
            "targets": [*head, "Linear"] if len(modules) == 1 else names,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": arguments[0],
                "group_size": arguments[1],
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
            "input_activations": None,
            "output_activations": None,
        }
    plain = [
        pattern(name)
        for name, info in infos.items()
        if name not in schemes and len(info.shape) == 2 and name != config.embedding_name
    ]
    if "lm_head.weight" not in infos:
        plain.append(pattern("lm_head"))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "version": VERSION,
        "config_groups": groups,
        "ignore": sorted(plain) + (NOT_OURS if wrapped else []),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def export_matrix(reader: SafetensorsReader, name: str, scheme: dict) -> Exported:
    """One packed matrix in the new layout, some rows at a time."""
    stem, size, (rows, columns) = name.removesuffix(".weight"), scheme["group_size"], scheme["shape"]
    sums, counts, words, scales, zeros = [0.0, 0.0], {"clipped_groups": 0, "constant_groups": 0}, [], [], []
    for part in row_blocks(rows, columns):
        stored = [reader.tensor(stem + end, part.start, part.stop) for end in (CODES, SCALES, MINIMA)]
        codes = unpack_nibbles(stored[0], columns)
        theirs = dequantize(codes, *stored[1:], size)
        codes, scale, zero, clipped, constant = integer_zeros(codes, *stored[1:], size)
        minima = (0 - zero.float()) * scale.float()
        add_squares(sums, theirs, dequantize(codes, scale, minima, size))
        counts["clipped_groups"] += clipped
        counts["constant_groups"] += constant
        words.append(pack_words(codes))
        scales.append(scale)
        zeros.append(zero)
    tensors = {
        "weight_packed": torch.cat(words),
        "weight_scale": torch.cat(scales),
        "weight_zero_point": pack_words(torch.cat(zeros).T.contiguous()).T.contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    report = {"name": name, "group_size": size, "groups": rows * group_count(columns, size), **counts}
    report["relative_error"] = relative_error(sums)
    return Exported({f"{stem}.{part}": tensor for part, tensor in tensors.items()}, report, sums)


def integer_zeros(
    codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Codes uint8 [rows, in], scales bf16 and zero points uint8 [rows, groups] with the nearest weights that these
    scales allow; numbers of groups whose zero point was clipped, and of groups of one value."""
    constant, scale, value = scales == 0, scales.float(), minima.float()
    wanted = torch.where(constant, 0.0, (-value / torch.where(constant, 1.0, scale)).round())
    zeros = wanted.clamp(0, LEVELS)
    clipped = int((zeros != wanted).sum())
    # a group of one value v: code minus zero point is its sign, in steps of |v|
    factor, shift = torch.where(constant, 0.0, 1.0), torch.where(constant, (value > 0).float(), zeros - wanted)
    moved = dequantize(codes, factor, shift, group_size).clamp_(0, LEVELS)
    zeros = torch.where(constant, (value < 0).float(), zeros)
    scale = torch.where(constant, torch.where(value == 0, 1.0, value.abs()), scale)
    return moved.to(torch.uint8), scale.to(scales.dtype), zeros.to(torch.uint8), clipped, int(constant.sum())


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [rows, n] in 0..15 to int32 [rows, ceil(n / 8)], lowest bits first. A signed code of the format is
    stored with 8 added, which makes it a code of ours."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    return pack_nibbles(codes).flatten().view(torch.int32).unflatten(0, (len(codes), -1))
