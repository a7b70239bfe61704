"""Make an HQQ checkpoint of a model; runs in its own environment and knows nothing of Yardstick.

The scheme is the number of bits. The output head and the embedding stay as they are, as the tool has it. It looks at no
text.
"""

from pathlib import Path

import torch
from hqq.core.quantize import BaseQuantizeConfig
from hqq.models.hf.base import AutoHQQHFModel
from transformers import AutoModelForCausalLM


def main(recipe: dict, model: Path, calibration: Path | None, output: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, use_safetensors=True)
    settings = BaseQuantizeConfig(nbits=int(recipe["scheme"]), group_size=recipe["group_size"], axis=1)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    AutoHQQHFModel.quantize_model(loaded, quant_config=settings, compute_dtype=torch.bfloat16, device=device)
    AutoHQQHFModel.save_quantized(loaded, str(output))
