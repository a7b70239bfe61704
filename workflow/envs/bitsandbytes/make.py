"""Make a bitsandbytes checkpoint of a model; runs in its own environment and knows nothing of Yardstick.

Schemes: nf4, nf4-nested (statistics quantized too), fp4, int8 (LLM.int8). The output head stays bf16, as the tool has
it.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

SCHEMES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def main(recipe: dict, model: Path, calibration: Path | None, output: Path) -> None:
    settings = BitsAndBytesConfig(**SCHEMES[recipe["scheme"]], bnb_4bit_compute_dtype=torch.bfloat16)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    quantized = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=settings, dtype=torch.bfloat16, device_map={"": device}, use_safetensors=True
    )
    quantized.save_pretrained(output)
