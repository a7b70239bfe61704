"""Text that the model itself writes: the distribution that its users meet.

Ids are drawn from the model's own distribution, temperature 1 and nothing cut off, from the id that starts a document
on, or from what a chat template writes in front of a user's turn: an instruct model then asks itself and answers
(Magpie, arXiv 2406.08464). For every candidate q the expected difference of the two NLLs at a position is the KL there,

    E[log p(x) - log q(x)] = KL(p || q)  for x drawn from p,

which makes this corpus a test of the ruler: two figures that are computed apart must agree within their error.
"""

from collections.abc import Callable

import numpy as np

from yardstick.errors import YardstickError
from yardstick.evaluate.statistics import GIVEN
from yardstick.models.generate import Model, Sampler, Text, generate


def sample_windows(
    model: Model, start: list[int], count: int, length: int, seed: int, on_ids: Callable[[int], None] = lambda ids: None
) -> np.ndarray:
    """`count` windows of `length` positions: int32 [count, length + 1], each a text of its own from `start` on.

    An end of text inside a window stays, and the model goes on behind it.

    Raises:
        YardstickError: the start is empty or has too many ids, which were not drawn and would not test the ruler.
    """
    if not 0 < len(start) <= GIVEN:
        raise YardstickError(f"own text: its start has {len(start)} ids; it may have 1 to {GIVEN}")
    rows = np.empty((count, length + 1), dtype=np.int32)

    def ended(text: Text) -> str | None:
        on_ids(1)
        return "whole" if len(text.written) == length + 1 - len(start) else None

    texts = (Text(row, start) for row in range(count))
    for text, _ in generate(model, texts, count, length + 1, Sampler(seed), ended):
        rows[text.key] = [*start, *text.written]
    return rows
