"""Make a GPTQ-layout checkpoint with AutoRound; runs in its own environment and knows nothing of Yardstick.

Schemes: sym and asym, int4. The output head stays as it is, as the tool has it.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(recipe: dict, model: Path, calibration: Path | None, output: Path) -> None:
    ids = torch.from_numpy(np.load(calibration))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, use_safetensors=True)
    rounding = AutoRound(
        loaded,
        AutoTokenizer.from_pretrained(model),
        bits=4,
        group_size=recipe["group_size"],
        sym=recipe["scheme"] == "sym",
        iters=recipe["iterations"],
        dataset=[{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids],
        nsamples=len(ids),
        seqlen=ids.shape[1],
        enable_torch_compile=False,
        device_map="cuda:0" if torch.cuda.is_available() else "cpu",
        seed=0,
    )
    rounding.quantize_and_save(str(output), format="auto_gptq")
    for path in list(output.glob("*/*")):  # what it writes into a folder of its own inside
        shutil.move(path, output / path.name)
    for path in list(output.iterdir()):
        if path.is_dir():
            path.rmdir()
