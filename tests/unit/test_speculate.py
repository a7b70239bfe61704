"""Draft and verify writes what plain greedy generation writes, whatever is drafted; the drafts against definitions."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import write_tiny_model
from yardstick.errors import YardstickError
from yardstick.models.folder import open_folder
from yardstick.models.generate import Model, NotFiniteError, Text, generate, greedy
from yardstick.models.parts import rotary_table
from yardstick.models.prediction_head import HeadDraft, head_tensors, load_prediction_head
from yardstick.models.prefill import final_hidden_states
from yardstick.models.speculate import Speculation, prompt_lookup, speculate
from yardstick.models.state import LayerState

FAMILIES = [("llama", True, 2), ("qwen2", False, 2), ("qwen3", True, 2), ("qwen3_5", False, 4)]
LENGTH, CAPACITY = 24, 64
PROMPT = [5, 17, 99, 230, 41, 8, 77, 302, 5, 17, 9]
FLOAT, CPU = torch.float32, torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def open_model(folder) -> Model:
    original = open_folder(folder)
    with torch.no_grad():
        return Model(original.source, original.config, FLOAT, original.config.vocab_size)


@pytest.fixture(scope="module", params=FAMILIES, ids=[family for family, _, _ in FAMILIES])
def model(request, tmp_path_factory):
    family, tied, layers = request.param
    return open_model(write_tiny_model(tmp_path_factory.mktemp("speculate") / family, family, tied, layers=layers))


@pytest.fixture(scope="module")
def with_head(tmp_path_factory):
    """A folder of Qwen3.5 with a random prediction head, in which no gain is 0 and no matrix is square."""
    folder = write_tiny_model(tmp_path_factory.mktemp("head") / "m", "qwen3_5", False, layers=4)
    tensors, rng = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    for name, shape in head_tensors(open_folder(folder).config).items():
        scale = 0.3 if len(shape) == 1 else 0.12
        tensors[f"mtp.{name}"] = (scale * torch.randn(shape, generator=rng)).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def opened(with_head):
    original, model = open_folder(with_head), open_model(with_head)
    return original, model, load_prediction_head(original.source, original.config, FLOAT, model.device)


def until(length: int):
    return lambda text: "whole" if len(text.written) >= length else None


def plain(model, ended=None, prompt=PROMPT, capacity: int = CAPACITY) -> tuple[list[int], str]:
    ((text, reason),) = generate(model, [Text(0, prompt)], 1, capacity, greedy, ended or until(LENGTH))
    return text.written, reason


def drafted(model, draft, most: int = 4, ended=None, prompt=PROMPT, capacity: int = CAPACITY):
    text = Text(0, prompt)
    done = speculate(model, text, capacity, draft, most, ended or until(LENGTH))
    return text.written, done


def knowing(answer: list[int], right=lambda index: True, prompt=PROMPT):
    """A draft that knows what is written, and says something else where an index is not to be right."""

    def draft(ids, hidden, most):
        start = len(ids) - len(prompt)
        return [answer[i] if right(i) else (answer[i] + 1) % 512 for i in range(start, min(start + most, len(answer)))]

    return draft


def test_wrong_drafts_change_nothing_and_cost_a_step_an_id(model):
    answer, _ = plain(model, until(LENGTH + 8))
    assert len(set(answer)) > 4  # a text that stands still would hide a state that is not put back
    written, done = drafted(model, knowing(answer, lambda index: False))
    assert written == answer[:LENGTH]
    assert done == Speculation("whole", steps=LENGTH - 1, drafted=4 * (LENGTH - 1), accepted=0)


@pytest.mark.parametrize("most", [1, 4, 7])
def test_right_drafts_save_steps(model, most):
    answer, _ = plain(model, until(LENGTH + 8))
    written, done = drafted(model, knowing(answer), most)
    assert written == answer[:LENGTH]
    assert done.steps == math.ceil((LENGTH - 1) / (most + 1))  # the first id comes of the prompt
    assert done.drafted == most * done.steps
    # a step writes what it accepts and one id more, unless an accepted id ends the text
    assert LENGTH - 1 - done.accepted in (done.steps, done.steps - 1)


def test_drafts_that_are_half_right(model):
    """Each third id is drafted wrong: a step of 4 keeps 2 and writes 3, until 24 ids are there after 8 steps."""
    answer, _ = plain(model, until(LENGTH + 8))
    written, done = drafted(model, knowing(answer, lambda index: index % 3 != 0))
    assert written == answer[:LENGTH]
    assert done == Speculation("whole", steps=8, drafted=32, accepted=16)


def test_a_draft_may_say_nothing(model):
    written, done = drafted(model, lambda ids, hidden, most: [])
    assert written == plain(model)[0]
    assert done == Speculation("whole", steps=LENGTH - 1)


def changed(model, **parts) -> Model:
    other = Model.__new__(Model)
    other.__dict__ |= model.__dict__ | parts
    return other


def test_prompt_lookup_follows_a_text_that_repeats_itself(model):
    """Large embeddings, and a head whose row j is the embedding of j - 1: the model counts from 0 to 8, and again."""
    counting = changed(model, embedding=30 * model.embedding, head=model.embedding[[8, *range(8)]])
    prompt, ended = [4, 5, 6, 7, 8, 0, 1, 2, 3], until(40)
    answer, _ = plain(counting, ended, prompt)
    assert answer == [(4 + i) % 9 for i in range(40)]
    written, done = drafted(counting, prompt_lookup, 3, ended, prompt)
    assert written == answer
    # the first id comes of the prompt, then 4 a step; the last of 10 steps has 3 to write
    assert done == Speculation("whole", steps=10, drafted=30, accepted=30)


def test_prompt_lookup_changes_nothing_where_it_is_mostly_wrong(model):
    prompt, ended = [3, 250, 71, 9] * 5, until(40)
    written, done = drafted(model, prompt_lookup, 3, ended, prompt)
    assert written == plain(model, ended, prompt)[0]
    assert done.drafted > done.accepted


def test_an_end_inside_an_accepted_run_is_where_plain_greedy_ends(model):
    answer, _ = plain(model, until(LENGTH + 8))
    for length in range(1, 14):
        written, done = drafted(model, knowing(answer), 5, until(length))
        assert written == answer[:length] and done.reason == "whole"
        assert done.steps == math.ceil((length - 1) / 6)

    stop = answer[9]

    def at_an_id(text):
        return "end" if text.written[-1] == stop else until(LENGTH)(text)

    written, done = drafted(model, knowing(answer), 5, at_an_id)
    assert (written, done.reason) == plain(model, at_an_id)
    assert written == answer[: answer.index(stop) + 1] and done.reason == "end"


def test_the_end_is_asked_for_once_an_id(model):
    answer, asked = plain(model)[0], []

    def ended(text):
        asked.append(list(text.written))
        return until(LENGTH)(text)

    drafted(model, knowing(answer, lambda index: index % 5 != 0), 3, ended)
    assert asked == [answer[: i + 1] for i in range(LENGTH)]


def test_the_capacity_is_never_exceeded(model, monkeypatch):
    capacity, seen, through = len(PROMPT) + LENGTH, [], Model.hidden_states
    answer, _ = plain(model, until(LENGTH + 8))

    def watched(self, ids, states, rotary):
        hidden = through(self, ids, states, rotary)
        seen.append(states[0].length)
        return hidden

    def greedy_for_room(ids, hidden, most):
        assert 0 < most <= min(4, capacity - len(ids))
        return knowing(answer)(ids, hidden, 9)

    monkeypatch.setattr(Model, "hidden_states", watched)
    written, _ = drafted(model, greedy_for_room, capacity=capacity)
    assert written == plain(model, capacity=capacity)[0] == answer[:LENGTH]
    assert max(seen) <= capacity and len(seen) > 3


def test_states_put_back_are_those_of_the_ids_alone(model):
    rotary, ids = rotary_table(model.config, CAPACITY, model.device, FLOAT), [4, 90, 333, 12, 7]
    for kept in range(1, 6):
        states, alone = ([LayerState(CAPACITY) for _ in model.layers] for _ in range(2))
        for some in (states, alone):
            model.hidden_states(torch.tensor([PROMPT]), some, rotary)
        for state in states:
            state.trail = []
        model.hidden_states(torch.tensor([ids]), states, rotary)
        model.hidden_states(torch.tensor([ids[:kept]]), alone, rotary)
        for layer, (state, expected) in enumerate(zip(states, alone, strict=True)):
            state.rewind(len(PROMPT) + kept)
            assert state.length == expected.length == len(PROMPT) + kept
            if model.config.layer_kind(layer) == "full_attention":
                pairs = zip(state.cached, expected.cached, strict=True)
            else:
                pairs = ((state.memory, expected.memory), (state.window, expected.window))
            for found, right in pairs:
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
        following = torch.tensor([[200, 6]])
        after = (model.logits(following, some, rotary) for some in (states, alone))
        torch.testing.assert_close(*after, rtol=1e-4, atol=1e-4)


def test_states_that_were_not_kept_are_not_made_up(model):
    rotary, states = (
        rotary_table(model.config, CAPACITY, model.device, FLOAT),
        [LayerState(CAPACITY) for _ in model.layers],
    )
    model.hidden_states(torch.tensor([PROMPT]), states, rotary)
    for layer, state in enumerate(states):
        for length in (-1, len(PROMPT) + 1):
            with pytest.raises(YardstickError, match=f"a state of 11 positions cannot go back to {length}"):
                state.rewind(length)
        if model.config.layer_kind(layer) != "full_attention":
            with pytest.raises(YardstickError, match="a delta net kept no state to go back to position 10"):
                state.rewind(10)
        state.trail = []
    model.hidden_states(torch.tensor([[1, 2, 3]]), states, rotary)
    for layer, state in enumerate(states):
        if model.config.layer_kind(layer) != "full_attention":
            with pytest.raises(YardstickError, match="a delta net kept no state to go back to position 11"):
                state.rewind(11)
            state.rewind(13)
            with pytest.raises(YardstickError, match="a delta net kept no state to go back to position 12"):
                state.rewind(12)  # those of the step are gone once it was put back


def test_what_cannot_be_written_is_refused(model):
    for prompt in ([], list(range(CAPACITY))):
        with pytest.raises(YardstickError, match="does not fit into 64 positions"):
            drafted(model, prompt_lookup, prompt=prompt)
    with pytest.raises(YardstickError, match="0 ids are to be drafted in a step"):
        drafted(model, prompt_lookup, 0)
    broken = changed(model, gain=model.gain * float("nan"))
    with pytest.raises(NotFiniteError, match="the logits after 0 ids of text 0 are not finite"):
        drafted(broken, prompt_lookup)


@pytest.mark.parametrize(
    ("ids", "most", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 6, [9, 1, 2, 3, 9, 1]),  # read on into itself
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, [8]),  # the latest place
        ([1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3], 1, [7]),  # three ids before two, though two are nearer
        ([5, 2, 3, 8, 6, 3, 4, 1, 2, 3], 2, [8, 6]),  # two ids before one
        ([3, 8, 6, 4, 1, 2, 3], 3, [8, 6, 4]),  # one id
        ([6, 6, 6, 6], 3, [6, 6, 6]),  # places may overlap
        ([1, 2, 3, 4], 3, []),
        ([4, 4], 2, [4, 4]),
        ([4], 2, []),
    ],
)
def test_prompt_lookup_by_hand(ids, most, expected):
    assert prompt_lookup(ids, None, most) == expected


def by_definition(weights, config, embedding, following: list[int], hidden: torch.Tensor) -> torch.Tensor:
    """g [length, hidden] of a prediction head, from the definition: one head at a time, rotation as complex numbers."""
    weights = {name: tensor.cpu() for name, tensor in weights.items()}

    def gained(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * (1 + weights[f"{name}.weight"])

    def turned(x):  # pairs (i, i + 4) of the first 8 entries turn by position * theta^(-i / 4)
        half = 4
        angles = torch.arange(len(x))[:, None] * config.rope_theta ** (-torch.arange(half) / half)
        z = torch.complex(x[:, :half], x[:, half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag, x[:, 2 * half :]], dim=1)

    def matrix(name):
        return weights[f"{name}.weight"].T

    first, second = matrix("fc").split(96)
    x = (
        gained(embedding.cpu()[following], "pre_fc_norm_embedding") @ first
        + gained(hidden, "pre_fc_norm_hidden") @ second
    )
    normed, block, past = gained(x, "layers.0.input_layernorm"), "layers.0.self_attn", len(x)
    queries, (key, value) = normed @ matrix(f"{block}.q_proj"), (normed @ matrix(f"{block}.{n}_proj") for n in "kv")
    key, contexts = turned(gained(key, f"{block}.k_norm")), []
    for head in range(3):
        query, gate = queries[:, 64 * head : 64 * head + 32], queries[:, 64 * head + 32 : 64 * head + 64]
        scores = turned(gained(query, f"{block}.q_norm")) @ key.T / 32**0.5
        scores = scores.masked_fill(torch.arange(past)[None] > torch.arange(past)[:, None], -torch.inf)
        contexts.append(scores.softmax(-1) @ value / (1 + (-gate).exp()))
    x = x + torch.cat(contexts, dim=1) @ matrix(f"{block}.o_proj")
    normed = gained(x, "layers.0.post_attention_layernorm")
    opened = normed @ matrix("layers.0.mlp.gate_proj")
    mlp = opened / (1 + (-opened).exp()) * (normed @ matrix("layers.0.mlp.up_proj"))
    return gained(x + mlp @ matrix("layers.0.mlp.down_proj"), "norm")


def test_the_prediction_head_is_its_definition(opened):
    """Its drafts at every step of a text, some of which accept much and some nothing, made anew from the start."""
    original, model, weights = opened
    config, answer, steps = original.config, plain(model)[0], []
    assert (config.rotary_dim, config.head_dim, config.num_heads, config.num_kv_heads) == (8, 32, 3, 1)
    head, given = HeadDraft(model, weights, CAPACITY), []
    helped = knowing(answer, lambda index: index % 7 not in (3, 4))

    def watched(ids, hidden, most):
        guesses = head(ids, hidden, most)
        given.append(hidden)
        states = torch.cat(given).cpu()
        expected = final_hidden_states(original.source, config, torch.tensor([ids[:-1]]), FLOAT, 1)[0].cpu()
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        following, right = ids[1:], []
        for _ in range(most):
            g = by_definition(weights, config, model.embedding, following, states)[-1]
            right.append(int((model.head.cpu() @ g).argmax()))
            following, states = [*following, right[-1]], torch.cat([states, g[None]])
        assert guesses == right and len(guesses) == most
        steps.append((len(hidden), tuple(guesses)))
        return helped(ids, hidden, most)

    assert drafted(model, watched, 3)[0] == answer
    assert {rows for rows, _ in steps} >= {len(PROMPT), 1, 3, 4} and len({guesses for _, guesses in steps}) > 5

    one = HeadDraft(model, weights, CAPACITY)
    hidden = torch.randn(7, 96)
    following = [4, 200, 31, 8, 15, 99, 500]
    torch.testing.assert_close(
        one.states(torch.tensor([following]), hidden[None].to(model.device))[0].cpu(),
        by_definition(weights, config, model.embedding, following, hidden),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("most", [1, 3])
def test_the_prediction_head_writes_what_plain_greedy_writes(opened, most):
    _, model, weights = opened
    capacity = len(PROMPT) + LENGTH
    written, done = drafted(model, HeadDraft(model, weights, capacity), most, capacity=capacity)
    assert written == plain(model)[0]
    assert done.drafted >= done.steps - 1 > 0


def test_a_prediction_head_that_is_not_there_or_another_is_refused(with_head, tmp_path):
    tensors = load_file(with_head / "model.safetensors")

    def refusal(tensors) -> str:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        original = open_folder(tmp_path)  # the evaluation reads none of it
        with pytest.raises(YardstickError) as error:
            load_prediction_head(original.source, original.config, FLOAT, CPU)
        return str(error.value)

    (tmp_path / "config.json").write_bytes((with_head / "config.json").read_bytes())
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    assert "has no multi-token prediction head of Qwen3.5 (mtp.* tensors)" in refusal(without)
    missing = {name: tensor for name, tensor in tensors.items() if name != "mtp.fc.weight"}
    assert "tensor mtp.fc.weight of the prediction head is missing" in refusal(missing)
    second = tensors | {"mtp.layers.1.mlp.up_proj.weight": torch.ones(2, 3)}
    assert "tensor mtp.layers.1.mlp.up_proj.weight of the prediction head is not known" in refusal(second)
    turned = tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"].T.contiguous()}
    assert "mtp.fc.weight is bf16 [192, 96]; the prediction head asks for plain floats [96, 192]" in refusal(turned)
    broken = tensors | {"mtp.norm.weight": torch.full((96,), torch.nan)}
    assert "tensor mtp.norm.weight is not finite at [0]" in refusal(broken)

    write_tiny_model(tmp_path / "qwen3", "qwen3", True)
    original = open_folder(tmp_path / "qwen3")
    with pytest.raises(YardstickError, match="has no multi-token prediction head of Qwen3.5"):
        load_prediction_head(original.source, original.config, FLOAT, CPU)
