"""Answers by `transformers`: its own model code and its own `generate`, with a candidate's dequantized weights."""

from collections.abc import Iterator
from pathlib import Path

import torch

from yardstick.gsm8k.answers import cut_at_stops, cut_when_complete
from yardstick.gsm8k.generation import LENGTH, STOP, Generation
from yardstick.gsm8k.prompts import Renderer
from yardstick.models.config import ModelConfig
from yardstick.models.folder import Original
from yardstick.models.generate import NotFiniteError
from yardstick.models.prefill import DTYPES, head_name, pick_device
from yardstick.sources.base import TensorSource


def load_model(folder: Path, source: TensorSource, config: ModelConfig, dtype: torch.dtype):
    """The original's transformers model with the weights of `source` in place of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False, use_safetensors=True)
    parameters = dict(model.named_parameters())
    names = {name: "model." + name.removeprefix(config.prefix) for name in config.tensors()}
    names = {name: own if own in parameters else name for name, own in names.items()}
    for name, own in names.items():
        parameters[own].data = source.get(name).to(dtype)
    if config.tied_head and head_name(source, config) != config.head_name:  # a candidate may bring a head of its own
        model.lm_head.weight = torch.nn.Parameter(source.get("lm_head.weight").to(dtype), requires_grad=False)
    return model.to(pick_device()).eval()


def require_finite(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Refuse logits [batch, vocabulary] that are not numbers; transformers would go on with the first id.

    Raises:
        NotFiniteError: one is not.
    """
    if not bool(logits.isfinite().all()):
        raise NotFiniteError("the logits of a batch of texts are not finite")
    return logits


def answer(
    source: TensorSource, original: Original, renderer: Renderer, prompts: list[str], indices: list[int], settings: dict
) -> Iterator[tuple[int, Generation]]:
    """Answer the prompts of these indices, a batch at a time with padding in front; gives (index, generation)."""
    from transformers import GenerationConfig, LogitsProcessorList

    model = load_model(original.folder, source, original.config, DTYPES[settings["dtype"]])
    pad, max_new_tokens, batch = min(renderer.stop_ids), settings["max_new_tokens"], settings["batch"]
    # a config of its own: those of checkpoints ask for sampling and penalties
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(renderer.stop_ids), pad_token_id=pad
    )
    checks = LogitsProcessorList([require_finite])
    for start in range(0, len(indices), batch):
        rows = [(index, renderer.encode(prompts[index])) for index in indices[start : start + batch]]
        width = max(len(ids) for _, ids in rows)
        padded = torch.tensor([[pad] * (width - len(ids)) + ids for _, ids in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids in rows], device=model.device)
        with torch.no_grad():
            output = model.generate(padded, attention_mask=mask, generation_config=greedy, logits_processor=checks)
        output = output[:, width:].tolist()
        for (index, _), ids in zip(rows, output, strict=True):
            ends = [place for place, token in enumerate(ids) if token in renderer.stop_ids]
            ids = ids[: ends[0] + 1] if ends else ids
            text = renderer.decode(ids)
            # cut where our own backend would have stopped
            complete = cut_when_complete(text, settings["answer"])
            stopped = bool(ends) or complete is not None or any(stop in text for stop in renderer.stops)
            written = cut_at_stops(complete or text, renderer.stops)
            yield index, Generation(written, STOP if stopped else LENGTH, len(ids))
