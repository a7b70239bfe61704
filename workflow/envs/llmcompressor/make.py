"""Make a compressed-tensors checkpoint with llm-compressor; runs in its own environment and knows nothing of Yardstick.

Schemes without calibration: FP8_DYNAMIC (weights E4M3 with a scale a row), NVFP4A16, MXFP4A16. With it: GPTQ (W4A16,
or another group size) and AWQ (W4A16_ASYM). The output head stays as it is, as the tool's own examples have it.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM

DATA_FREE = ("FP8_DYNAMIC", "NVFP4A16", "MXFP4A16")


def main(recipe: dict, model: Path, calibration: Path | None, output: Path) -> None:
    scheme = recipe["scheme"]
    if scheme in DATA_FREE:
        # the four-bit floats fail on weights loaded as fp32
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, use_safetensors=True)
        modifier = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        oneshot(model=loaded, recipe=modifier)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_safetensors=True)
        settings = {"dataset": sequences(calibration, recipe["sequences"]), "max_seq_length": recipe["length"]}
        settings |= {"num_calibration_samples": recipe["sequences"]}
        oneshot(model=loaded, recipe=calibrated(recipe), **settings)
        loaded = loaded.to(torch.bfloat16)
    loaded.save_pretrained(output, save_compressed=True)


def calibrated(recipe: dict):
    """A modifier that looks at text."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": recipe["scheme"] == "GPTQ", "strategy": "group"}
    scheme["group_size"] = recipe["group_size"]
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    if recipe["scheme"] == "GPTQ":
        return GPTQModifier(config_groups=groups, ignore=["lm_head"])
    from llmcompressor.modifiers.awq import AWQModifier

    torch.Tensor.pin_memory = lambda self, *_: self  # without a GPU the modifier pins all the same, and fails
    return AWQModifier(config_groups=groups, ignore=["lm_head"])


def sequences(calibration: Path, count: int):
    """The first `count` sequences of our calibration ids, spread over the corpora in their order."""
    from datasets import Dataset

    with np.load(calibration, allow_pickle=False) as bundle:
        rows = np.concatenate([bundle[name] for name in bundle.files])
    picked = rows[np.linspace(0, len(rows) - 1, count).astype(int)]
    return Dataset.from_dict({"input_ids": picked.tolist(), "attention_mask": np.ones_like(picked).tolist()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    main(arguments.recipe, arguments.model, arguments.calibration, arguments.output)
