"""A step as a CUDA graph, with a stand-in for the card that replays the step itself: what is restored, what is kept."""

from contextlib import contextmanager

import pytest
import torch

from tests.tiny import write_tiny_model
from yardstick.engine import graphs
from yardstick.errors import YardstickError
from yardstick.models.folder import open_folder
from yardstick.models.generate import EagerStep, Model, Text, generate, greedy


class FakeGraph:
    """Replays by running the recorded step again, as a graph would, into the tensor that was recorded."""

    def __init__(self):
        self.step = None

    def replay(self):
        FakeCuda.steps += 1
        self.step._logits.copy_(self.step._step() + FakeCuda.error)


class FakeCuda:
    steps, error = 0, 0.0


@pytest.fixture
def card(monkeypatch):
    class Stream:
        def wait_stream(self, other):
            pass

    @contextmanager
    def stream(side):
        yield

    @contextmanager
    def graph(recorded):
        yield  # a real card records here and runs nothing; this one runs the step, which the restore undoes

    FakeCuda.steps, FakeCuda.error = 0, 0.0
    for name, value in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": stream,
        "graph": graph,
        "CUDAGraph": FakeGraph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    made = graphs.GraphStep._record

    def record(step):
        class Bound(FakeGraph):
            def __init__(self):
                self.step = step

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Bound)
        made(step)

    monkeypatch.setattr(graphs.GraphStep, "_record", record)


def written(model, stepper):
    texts = [Text(key, [5 + key, 17, 40 + 3 * key][: 2 + key % 2]) for key in range(5)]
    ended = lambda text: "whole" if len(text.written) == 6 + text.key else None  # noqa: E731
    found = generate(model, texts, 2, 24, greedy, ended, stepper=stepper)
    return {text.key: text.written for text, _ in found}


@pytest.fixture(scope="module", params=[("llama", 2), ("qwen3_5", 4)], ids=["llama", "qwen3_5"])
def model(request, tmp_path_factory):
    family, layers = request.param
    original = open_folder(write_tiny_model(tmp_path_factory.mktemp("graph") / "m", family, False, layers=layers))
    with torch.no_grad():
        return Model(original.source, original.config, torch.float32, 512)


@torch.no_grad()
def test_recording_leaves_no_trace_in_the_texts(model, card):
    """Trials, recording and the check all run the step; the texts are those of eager steps."""
    assert written(model, graphs.GraphStep) == written(model, EagerStep)
    assert FakeCuda.steps > 10


@torch.no_grad()
def test_a_replay_that_gives_other_logits_is_refused(model, card):
    FakeCuda.error = 0.1
    with pytest.raises(YardstickError, match="differs from the eager one by"):
        written(model, graphs.GraphStep)


def test_only_a_card_records():
    assert graphs.stepper_for(torch.device("cpu")) is EagerStep
    assert graphs.stepper_for(torch.device("cuda")) is graphs.GraphStep
