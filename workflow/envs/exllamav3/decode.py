"""Spell out the weights of an EXL3 checkpoint with exllamav3's own kernels; knows nothing of Yardstick.

Needs a CUDA GPU and a compiler: the kernels are built when they are first imported. One matrix is on the GPU at a time.
Weights are written in fp16, in which the kernels give them, so nothing is rounded again.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SHARD_BYTES = 2 << 30
TILE = 16
PARTS = ("suh", "svh", "su", "sv", "trellis", "mcg", "mul1")


def main(recipe: dict, model: Path, calibration: Path | None, output: Path) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("EXL3 is decoded by CUDA kernels, and there is no GPU here")
    opened = [safe_open(path, "pt") for path in sorted(model.glob("*.safetensors"))]
    places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (a file is not a mapping)
    shard, size, weight_map = {}, 0, {}
    for name, tensor in decoded(places):
        shard[name] = tensor
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            write_shard(output, shard, weight_map)
            shard, size = {}, 0
    write_shard(output, shard, weight_map)
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def decoded(places: dict):
    """Every tensor by its Hugging Face name: quantized matrices spelled out, the rest as it is."""
    stems = {name.removesuffix(".trellis") for name in places if name.endswith(".trellis")}
    embedding = next((name for name in places if name.endswith("embed_tokens.weight")), None)
    for name in sorted(places):
        stem, _, part = name.rpartition(".")
        if stem not in stems or part not in PARTS:
            yield name, places[name].get_tensor(name)
        elif part == "trellis":
            weight = matrix(stem, places)
            if stem.endswith("lm_head") and embedding:  # rows beyond the vocabulary are padding
                weight = weight[: places[embedding].get_slice(embedding).get_shape()[0]]
            yield f"{stem}.weight", weight.contiguous()


def matrix(stem: str, places: dict) -> torch.Tensor:
    """fp16 [out, in] of one quantized matrix."""
    from exllamav3.modules.quant.exl3 import LinearEXL3

    names = {part: f"{stem}.{part}" for part in PARTS}
    parts = {part: places[name].get_tensor(name) for part, name in names.items() if name in places}
    # the codebook's markers stay on the CPU, where the tool has them too
    parts = {part: tensor if part in ("mcg", "mul1") else tensor.cuda() for part, tensor in parts.items()}
    columns, rows = (TILE * size for size in parts["trellis"].shape[:2])
    linear = LinearEXL3(None, columns, rows, **parts, out_dtype=torch.half, key=stem)
    return linear.get_weight_tensor().T.cpu()


def write_shard(output: Path, shard: dict, weight_map: dict) -> None:
    if shard:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, output / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
