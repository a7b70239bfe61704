"""Answers by our own forward: greedy, in batches, with the candidate's weights as its format defines them."""

import importlib
from collections.abc import Iterator

from yardstick.engine import PACKED_MODEL
from yardstick.engine.graphs import stepper_for
from yardstick.gsm8k.answers import cut_at_stops, is_complete
from yardstick.gsm8k.generation import LENGTH, STOP, Generation
from yardstick.gsm8k.prompts import Renderer
from yardstick.models.folder import Original, vocabulary_size
from yardstick.models.generate import Model, Text, common_prefix, generate, greedy
from yardstick.models.prefill import DTYPES
from yardstick.sources.base import TensorSource


def answer(
    source: TensorSource, original: Original, renderer: Renderer, prompts: list[str], indices: list[int], settings: dict
) -> Iterator[tuple[int, Generation]]:
    """Answer the prompts of these indices; gives (index, generation) as they are finished.

    Room is taken for the longest of all prompts, those included that were answered before: a resumed run has the same
    shapes, and so the same answers.
    """
    vocabulary = vocabulary_size(renderer.tokenizer)
    opened = importlib.import_module(PACKED_MODEL).open_model if settings.get("weights") == "packed" else Model
    model = opened(source, original.config, DTYPES[settings["dtype"]], vocabulary)
    ids, max_new_tokens = [renderer.encode(prompt) for prompt in prompts], settings["max_new_tokens"]
    capacity = max(map(len, ids)) + max_new_tokens

    def ended(text: Text) -> str | None:
        if text.written[-1] in renderer.stop_ids:
            return STOP
        written = renderer.decode(text.written)
        if any(stop in written for stop in renderer.stops) or is_complete(written, settings["answer"]):
            return STOP
        return LENGTH if len(text.written) >= max_new_tokens else None

    texts = (Text(index, ids[index]) for index in indices)
    prefix = common_prefix(ids)
    stepper = stepper_for(model.device)
    for text, reason in generate(model, texts, settings["batch"], capacity, greedy, ended, prefix, stepper):
        written = cut_at_stops(renderer.decode(text.written), renderer.stops)
        yield text.key, Generation(written, reason, len(text.written))
