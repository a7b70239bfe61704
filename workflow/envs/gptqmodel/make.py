"""Make a GPTQ checkpoint with GPTQModel; runs in its own environment and knows nothing of Yardstick.

Schemes: sym and asym, int4. The output head stays as it is, as the tool has it.
"""

import os
from pathlib import Path

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # read when it is imported

import numpy as np
import torch
from gptqmodel import GPTQModel, QuantizeConfig


def main(recipe: dict, model: Path, calibration: Path | None, output: Path) -> None:
    ids = np.load(calibration)
    settings = QuantizeConfig(bits=4, group_size=recipe["group_size"], sym=recipe["scheme"] == "sym", desc_act=False)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    loaded = GPTQModel.load(str(model), settings, device=device)
    loaded.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids.tolist()], batch_size=1)
    loaded.save(str(output))
