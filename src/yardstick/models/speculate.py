"""Draft and verify: greedy generation of one text with fewer forwards of the model (Leviathan et al. 2023, 2211.17192).

Generation of one text is bound by reading the weights, and a forward over a few ids reads them once. In each step a
draft guesses ids, one forward over the last id and the guesses gives the model's own choice after each of them, and the
guesses are kept as far as they agree with it, with the model's own choice behind them. A wrong guess costs time alone:
what is kept is what the model chose, so the text is that of plain greedy generation.

Plain and speculative generation add up their products in another order (one row or several), so where two logits are
nearly equal their choices may differ, in fp32 as in bf16; neither is then the better one.

Going back to what was kept costs no second forward. Keys and values are cut by their count. A delta net's memory
cannot be cut; a verifying forward goes through its rule one position at a time, as plain generation does. The memory
after each position is then made anyway and is kept until the step is over: most + 1 memories a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from yardstick.errors import YardstickError
from yardstick.models.generate import Ended, Model, Text, add, greedy
from yardstick.models.parts import rotary_table
from yardstick.models.state import LayerState

LONGEST_NGRAM = 3
# guesses at most `most` ids that follow the ids of a text (prompt and all). The model's final-normed hidden states
# [new, hidden] come with them: those of the positions before the last id that no earlier call was given
Draft = Callable[[list[int], torch.Tensor, int], list[int]]


@dataclass
class Speculation:
    """How a text was written: forwards after that of the prompt, ids drafted, and those of them that were kept."""

    reason: str | None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def speculate(model: Model, text: Text, capacity: int, draft: Draft, most: int, ended: Ended) -> Speculation:
    """Continue a text until it has ended, as `generate` does with `greedy`; its ids are added to `text.written`.

    Args:
        capacity: positions that the text has room for, prompt and all; nothing is drafted beyond it.
        draft: guesses the next ids; one that keeps a state must not be used for a second text.
        most: ids that are drafted in a step.
        ended: called after each id that was added; `capacity` must not be reached before it gives a reason. Ids that
            were accepted behind the one that ends the text are dropped.

    Raises:
        NotFiniteError: the model's logits are not numbers.
        YardstickError: the prompt is empty or longer than the capacity allows, or nothing is to be drafted.
    """
    if not 0 < len(text.prompt) < capacity:
        raise YardstickError(f"a prompt of {len(text.prompt)} ids does not fit into {capacity} positions")
    if most < 1:
        raise YardstickError(f"{most} ids are to be drafted in a step; it takes at least 1")
    rotary = rotary_table(model.config, capacity, model.device, model.dtype)
    states = [LayerState(capacity) for _ in range(model.config.num_layers)]
    hidden = model.hidden_states(torch.tensor([text.prompt]), states, rotary)[0]
    for state in states:
        state.trail = []  # from here on: the memory after each position of a long prompt would not fit
    add(text, model.head_logits(hidden[-1]), greedy)
    done = Speculation(ended(text))
    while not done.reason:
        ids = text.prompt + text.written
        room = min(most, capacity - len(ids))
        guesses = draft(ids, hidden, room)[:room] if room > 0 else []
        hidden = model.hidden_states(torch.tensor([[ids[-1], *guesses]]), states, rotary)[0]
        kept, done.reason = agreeing(text, model.head_logits(hidden), guesses, ended)
        for state in states:
            state.rewind(len(ids) + kept)
        hidden = hidden[: kept + 1]
        done.steps, done.drafted, done.accepted = done.steps + 1, done.drafted + len(guesses), done.accepted + kept
    return done


def agreeing(text: Text, logits: torch.Tensor, guesses: list[int], ended: Ended) -> tuple[int, str | None]:
    """Add the model's choices to a text: those that the guesses agree with and the one behind, or up to the text's end.

    Takes the logits [guesses + 1, vocabulary] after the text's last id and after each guess. Returns how many guesses
    were kept, and why the text has ended if it has.
    """
    kept = 0
    while True:
        add(text, logits[kept], greedy)
        reason, right = ended(text), kept < len(guesses) and guesses[kept] == text.written[-1]
        kept += right
        if reason or not right:
            return kept, reason


def prompt_lookup(ids: list[int], hidden: torch.Tensor | None, most: int) -> list[int]:
    """A draft: what followed the last ids of the text where they occurred before (Saxena 2023, prompt lookup decoding).

    The last LONGEST_NGRAM ids are looked for first, then fewer; of several places the latest one counts. It is read on
    into the guesses themselves, so that a text that repeats itself at once is followed for the whole draft.
    """
    for length in range(min(LONGEST_NGRAM, len(ids) - 1), 0, -1):
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == ids[-length:]:
                following = list(ids)
                for source in range(start + length, start + length + most):
                    following.append(following[source])
                return following[len(ids) :]
    return []
