"""Round a whole model to nearest; no calibration text is needed."""

import re
from pathlib import Path

from yardstick.models.config import ModelConfig
from yardstick.progress import progress
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.grid import Grid, round_in_terms
from yardstick.sources.base import TensorSource


def quantize_model(
    source: TensorSource, config: ModelConfig, recipe: dict, writer: PackedWriter, calibration: Path | None
) -> list[str]:
    """Write all shards of the checkpoint; returns their names."""
    grid, terms = Grid(recipe["group_size"], recipe["mse"]), recipe.get("terms", 1)
    keep = re.compile(recipe["keep_bf16"]) if recipe["keep_bf16"] else None
    shards: dict[str, list[str]] = {f"layer-{i:05d}": [] for i in range(config.num_layers)}
    for layer, names in enumerate(shards.values()):
        names.extend(config.layer_name(layer, name) for name in config.layer_tensors(layer))
    shards["rest"] = [config.embedding_name, config.final_norm_name, "lm_head.weight"]
    matrices = {*config.body_matrices(), "lm_head.weight"}
    with progress(f"rtn g{grid.group_size}", len(shards), "shard") as done:
        for shard, names in shards.items():
            if not writer.has_shard(shard):
                for name in names:
                    is_head = name == "lm_head.weight"
                    tensor = source.get(config.head_name if is_head else name)
                    if name not in matrices:
                        writer.add_plain(name, tensor)
                    elif keep and keep.search(name):
                        writer.add_kept(name, tensor, is_head and config.tied_head)
                    else:
                        parts = round_in_terms(tensor.float(), grid, terms)
                        writer.add_quantized(name, *parts, grid.group_size, terms=terms)
                writer.finish_shard(shard)
            done(1)
    return list(shards)
