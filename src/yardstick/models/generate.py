"""Generation: texts continued in a batch, one id a step, each text as if it were alone.

The prompt of each text goes through the model alone; then it takes a slot of the batch, and when it ends the next one
takes its place. A step always has the same shape whatever the slots hold (see `state.BatchState`), so the ids that come
out depend neither on the order of the texts nor on which of them share a batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig
from yardstick.models.layers import run_block
from yardstick.models.parts import Rotary, Weights, linear, norm, rotary_table
from yardstick.models.prefill import Load, head_rows, layers_ahead, load_layer, pick_device
from yardstick.models.state import BatchState, LayerState, Slots
from yardstick.sources.base import TensorSource


class Model:
    """All weights of a model in memory, dequantized to the compute type; the head is fp32, as logits are.

    `load` reads a layer and `head` takes the place of the head's rows: the engine's keep packed matrices packed.
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        vocabulary: int,
        load: Load = load_layer,
        head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, pick_device()
        self.layers = [weights for _, weights in layers_ahead(source, config, dtype, self.device, load)]
        self.embedding = source.rows(config.embedding_name)[0 : config.vocab_size].to(self.device, dtype)
        self.gain = source.get(config.final_norm_name).to(self.device, dtype)
        # real rows alone: a checkpoint may pad its vocabulary, and no text may hold an id of the padding
        self.head = head or head_rows(source, config)[0:vocabulary].to(self.device, torch.float32)

    @classmethod
    def of_parts(
        cls,
        config: ModelConfig,
        layers: list[Weights],
        embedding: torch.Tensor,
        gain: torch.Tensor,
        head: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
    ) -> "Model":
        """A model whose weights are in memory already."""
        model = cls.__new__(cls)
        model.config, model.dtype, model.device = config, embedding.dtype, embedding.device
        model.layers, model.embedding, model.gain, model.head = layers, embedding, gain, head
        return model

    def logits(self, ids: torch.Tensor, states: list, rotary) -> torch.Tensor:
        """fp32 logits [batch, vocabulary] after the last of ids [batch, length], which the states then have seen."""
        return self.head_logits(norm(self._through_layers(ids, states, rotary)[:, -1], self.gain, self.config))

    def hidden_states(self, ids: torch.Tensor, states: list[LayerState], rotary) -> torch.Tensor:
        """Final-normed hidden states [batch, length, hidden] of ids [batch, length], which the states then hold."""
        return norm(self._through_layers(ids, states, rotary), self.gain, self.config)

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [..., vocabulary] of final-normed hidden states [..., hidden]."""
        return linear(hidden.float(), {"lm_head.weight": self.head}, "lm_head")

    def _through_layers(self, ids: torch.Tensor, states: list, rotary) -> torch.Tensor:
        hidden = self.embedding[ids.to(self.device)]
        for layer, (weights, state) in enumerate(zip(self.layers, states, strict=True)):
            hidden = run_block(hidden, weights, self.config, self.config.layer_kind(layer), rotary, state)
        return hidden


class EagerStep:
    """One more id of each text of a batch."""

    def __init__(self, model: Model, states: list[BatchState], slots: Slots, rotary: Rotary) -> None:
        self.model, self.states, self.slots, self.rotary = model, states, slots, rotary

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 logits [slots, vocabulary] after ids [slots, 1]; they hold until the next call."""
        logits = self.model.logits(ids, self.states, self.rotary)
        self.slots.advance()
        return logits


# what runs the steps of a batch
Stepper = Callable[[Model, list[BatchState], Slots, Rotary], Callable[[torch.Tensor], torch.Tensor]]


@dataclass
class Text:
    """A text that is being written: a key, the ids of its prompt, and what has been written so far."""

    key: int
    prompt: list[int]
    written: list[int] = field(default_factory=list)


class NotFiniteError(YardstickError):
    """The logits of a model hold a NaN or an infinity: there is nothing to choose from."""


# chooses the next id of each text, from its logits [vocabulary]
Choose = Callable[[Text, torch.Tensor], int]
# whether a text has ended, after an id was added to it: a reason, or None
Ended = Callable[[Text], str | None]


def greedy(text: Text, logits: torch.Tensor) -> int:
    """The id with the highest logit, the first of equals."""
    return int(logits.argmax())


class Sampler:
    """Draws from softmax(logits), with a generator for each text that is seeded by its key: a text does not depend on
    what is drawn beside it. The draw is a search in the cumulative distribution in fp64, ids in their own order."""

    def __init__(self, seed: int) -> None:
        self.seed, self._generators = seed, {}

    def __call__(self, text: Text, logits: torch.Tensor) -> int:
        if text.key not in self._generators:
            self._generators[text.key] = torch.Generator().manual_seed(self.seed * 1_000_003 + text.key)
        cumulative = logits.double().cpu().softmax(0).cumsum(0)
        uniform = torch.rand(1, dtype=torch.float64, generator=self._generators[text.key])
        return min(int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)), len(cumulative) - 1)


def generate(
    model: Model,
    texts: Iterable[Text],
    slots: int,
    capacity: int,
    choose: Choose,
    ended: Ended,
    prefix: Sequence[int] = (),
    stepper: Stepper = EagerStep,
) -> Iterator[tuple[Text, str]]:
    """Continue every text until it has ended; gives (text, reason) as they end.

    Args:
        slots: texts that are continued together; part of a result's recipe, since the order of additions in a matrix
            product may depend on the number of its rows.
        capacity: positions that every text has room for, prompt and all.
        choose: picks the next id.
        ended: called after each id that was added; `capacity` must not be reached before it gives a reason.
        prefix: ids that all prompts begin with, with more behind them; they go through the model once.
        stepper: how a step is run; made when all states hold a text for the first time.

    Raises:
        NotFiniteError: the model's logits are not numbers.
        YardstickError: a prompt is empty, or longer than the capacity allows.
    """
    rotary = rotary_table(model.config, capacity, model.device, model.dtype)
    batch = Slots(slots, capacity, model.dtype, model.device)
    states = [BatchState(batch) for _ in range(model.config.num_layers)]
    shared = read_prompt(model, prefix, [], capacity, rotary)[1] if prefix else []
    waiting, running = iter(texts), dict[int, Text]()
    free, step = list(range(slots)), None
    while True:
        while free and (text := next(waiting, None)) is not None:
            logits, own_states = read_prompt(model, text.prompt, shared, capacity, rotary)
            add(text, logits, choose)
            if reason := ended(text):
                yield text, reason
                continue
            slot = free.pop(0)
            running[slot] = text
            batch.place(slot, len(text.prompt))
            for state, own in zip(states, own_states, strict=True):
                state.insert(slot, own)
        if not running:
            return
        ids = torch.zeros(slots, 1, dtype=torch.int64)
        for slot, text in running.items():
            ids[slot] = text.written[-1]
        step = step or stepper(model, states, batch, rotary)
        logits = step(ids)
        for slot, text in sorted(running.items()):
            add(text, logits[slot], choose)
            if reason := ended(text):
                del running[slot]
                free.append(slot)
                yield text, reason


def read_prompt(
    model: Model, prompt: Sequence[int], shared: list[LayerState], capacity: int, rotary
) -> tuple[torch.Tensor, list[LayerState]]:
    """Logits [vocabulary] after a prompt, and the states that it leaves; `shared` are those of its beginning."""
    start = shared[0].length if shared else 0
    if not start < len(prompt) < capacity:
        raise YardstickError(f"a prompt of {len(prompt)} ids does not fit into {capacity} positions")
    states = [state.copy(len(prompt)) for state in shared]
    states = states or [LayerState(len(prompt)) for _ in range(model.config.num_layers)]
    return model.logits(torch.tensor([list(prompt[start:])]), states, rotary)[0], states


def common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Ids that all prompts begin with, at least one left behind them in each."""
    first, last = min(prompts), max(prompts)  # of sorted sequences these two differ first
    most = min(map(len, prompts)) - 1
    return [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(first[:most], last[:most], strict=True))]


def add(text: Text, logits: torch.Tensor, choose: Choose) -> None:
    if not bool(logits.isfinite().all()):
        raise NotFiniteError(f"the logits after {len(text.written)} ids of text {text.key} are not finite")
    text.written.append(choose(text, logits))
