"""Hugging Face's own forward on the same weights: the oracle that the first noise floor is measured with."""

from collections.abc import Callable
from pathlib import Path

import torch


def final_hidden_states(
    folder: Path,
    input_ids: torch.Tensor,
    dtype: torch.dtype,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> torch.Tensor:
    """Final-normed hidden states [chunks, length, hidden] by `transformers`, with its plain (eager) attention."""
    from transformers import AutoModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModel.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
    )
    model = model.to(device).eval()
    states = []
    with torch.no_grad():
        for row in input_ids:
            states.append(model(row[None].to(device), use_cache=False).last_hidden_state[0])
            on_tokens(len(row))
    return torch.stack(states)
