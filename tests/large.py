"""Large synthetic checkpoints in shards, and the peak memory of a step that reads one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny import tiny_tokenizer
from yardstick.models.config import read_config

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 65536,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_large_model(folder: Path, **changes) -> int:
    """Shards of one layer each, all layers alike (drawing three gigabytes would take longer than using them).

    Returns the bytes of all tensors.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config, weight_map, total = read_config(folder / "config.json"), {}, 0
    draw = torch.Generator().manual_seed(0)

    def tensor(shape):
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, generator=draw) * shape[1] ** -0.5).bfloat16()

    layer = {name: tensor(shape) for name, shape in config.layer_tensors(0).items()}
    shards = {
        f"layer-{i:02d}": {config.layer_name(i, name): value for name, value in layer.items()}
        for i in range(config.num_layers)
    }
    names = (config.embedding_name, config.final_norm_name, "lm_head.weight")
    shards["rest"] = {name: tensor(config.tensors()[name]) for name in names}
    for shard, tensors in shards.items():
        save_file(tensors, folder / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{shard}.safetensors")
        total += sum(value.nbytes for value in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


# the peak since the program began; what the system reports to a parent also counts the parent's own size at the fork
PEAK = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def peak_gigabytes(folder: Path, module: str, *arguments: str) -> float:
    """Peak resident memory of a step, run as the workflow runs it."""
    command = [sys.executable, "-c", PEAK, f"yardstick.cli.{module}", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return int(re.search(r"VmHWM:\s+(\d+) kB", result.stdout)[1]) * 1024 / 1e9
