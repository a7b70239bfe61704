"""Make a compressed-tensors checkpoint with llm-compressor; runs in its own environment and knows nothing of Yardstick.

Schemes without calibration: FP8_DYNAMIC (weights E4M3 with a scale a row), NVFP4A16, MXFP4A16. With it: GPTQ (symmetric
int4 in groups) and AWQ (asymmetric). The output head stays as it is, as the tool's own examples have it.
"""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
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
        ids = np.load(calibration)
        data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_safetensors=True)
        count, length = ids.shape
        modifier = calibrated(recipe)
        oneshot(model=loaded, recipe=modifier, dataset=data, num_calibration_samples=count, max_seq_length=length)
        loaded = loaded.to(torch.bfloat16)
    loaded.save_pretrained(output, save_compressed=True)


def calibrated(recipe: dict):
    """A modifier that looks at text."""
    weights = {"num_bits": 4, "type": "int", "symmetric": recipe["scheme"] == "GPTQ", "strategy": "group"}
    weights["group_size"] = recipe["group_size"]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if recipe["scheme"] == "GPTQ":
        return GPTQModifier(config_groups=groups, ignore=["lm_head"])
    if recipe["scheme"] != "AWQ":
        raise SystemExit(f"unknown scheme {recipe['scheme']}")
    from llmcompressor.modifiers.awq import AWQModifier

    if not torch.cuda.is_available():
        torch.Tensor.pin_memory = lambda self, *_: self  # the modifier pins all the same, and fails
    return AWQModifier(config_groups=groups, ignore=["lm_head"], n_grid=recipe.get("iterations", 20))
