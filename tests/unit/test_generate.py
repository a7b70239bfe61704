"""Texts continued in a batch are those that each would be alone, and those of transformers."""

import pytest
import torch

from tests.tiny import write_tiny_model
from yardstick.corpora.generated import sample_windows
from yardstick.errors import YardstickError
from yardstick.models.folder import open_folder
from yardstick.models.generate import Model, NotFiniteError, Sampler, Text, common_prefix, generate, greedy
from yardstick.models.prefill import final_hidden_states

FAMILIES = [("llama", True, 2), ("qwen2", False, 2), ("qwen3", True, 2), ("qwen3_5", False, 4)]
LENGTH, CAPACITY = 24, 64


@pytest.fixture(scope="module", params=FAMILIES, ids=[family for family, _, _ in FAMILIES])
def folder(request, tmp_path_factory):
    family, tied, layers = request.param
    return write_tiny_model(tmp_path_factory.mktemp("generate") / family, family, tied, layers=layers)


@pytest.fixture(scope="module")
def model(folder):
    original = open_folder(folder)
    with torch.no_grad():
        yield Model(original.source, original.config, torch.float32, original.config.vocab_size)


def prompts(count: int = 11, start=(5, 17, 99)) -> list[list[int]]:
    """Prompts of many lengths, all with one beginning."""
    rng = torch.Generator().manual_seed(3)
    return [[*start, *torch.randint(1, 512, (1 + 3 * i,), generator=rng).tolist()] for i in range(count)]


def ended(text: Text) -> str | None:
    """Texts of many lengths, so that slots are taken over at different steps."""
    return "whole" if len(text.written) >= LENGTH - text.key else None


def written(model, texts: list[Text], slots: int, choose=greedy, prefix=()) -> dict[int, list[int]]:
    with torch.no_grad():
        return {t.key: t.written for t, _ in generate(model, texts, slots, CAPACITY, choose, ended, prefix)}


def test_a_batch_is_one_by_one_token_for_token(model):
    texts = [Text(key, prompt) for key, prompt in enumerate(prompts())]
    alone = {}
    for text in texts:
        alone |= written(model, [Text(text.key, text.prompt)], 1)
    assert {key: len(ids) for key, ids in alone.items()} == {key: LENGTH - key for key in range(11)}
    assert len({tuple(ids[:6]) for ids in alone.values()}) > 5  # texts that differ, or order could not show
    for slots in (1, 4, 16):
        for order in (1, -1):
            assert written(model, [Text(t.key, t.prompt) for t in texts][::order], slots) == alone


def test_a_common_beginning_is_read_once_and_changes_nothing(model):
    texts = prompts()
    prefix = common_prefix(texts)
    assert prefix == [5, 17, 99]
    expected = written(model, [Text(key, ids) for key, ids in enumerate(texts)], 4)
    assert written(model, [Text(key, ids) for key, ids in enumerate(texts)], 4, prefix=prefix) == expected


def test_the_prefix_leaves_one_id_in_every_prompt():
    assert common_prefix([[1, 2, 3], [1, 2, 3]]) == [1, 2]
    assert common_prefix([[1, 2, 3, 4], [1, 2]]) == [1]
    assert common_prefix([[1], [1, 2]]) == []
    assert common_prefix([[4, 5], [9, 5]]) == []


def test_greedy_is_transformers_greedy(folder, model):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = written(model, [Text(key, prompt) for key, prompt in enumerate(prompts(5))], 3)
    for key, prompt in enumerate(prompts(5)):
        found = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=LENGTH - key,
            min_new_tokens=LENGTH - key,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert ours[key] == found


def test_logits_after_each_id_are_those_of_one_forward(folder, model):
    """The whole text through the prefill gives the logits that generation saw at its last id."""
    original, seen = open_folder(folder), {}

    def watching(text, logits):
        seen[text.key] = logits.clone()
        return greedy(text, logits)

    texts = [Text(key, prompt) for key, prompt in enumerate(prompts(6))]
    written(model, texts, 4, watching)
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.written[:-1]]])
        with torch.no_grad():
            states = final_hidden_states(original.source, original.config, ids, torch.float32, 1)
        expected = states[0, -1] @ model.head.T
        assert float((seen[text.key] - expected).norm() / expected.norm()) < 1e-5


def test_sampling_is_a_draw_from_the_softmax():
    logits = torch.log(torch.tensor([0.1, 0.0, 0.6, 0.3]))
    sampler, text = Sampler(5), Text(7, [1])
    drawn = torch.tensor([sampler(text, logits) for _ in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert shares[1] == 0
    assert torch.allclose(shares, torch.tensor([0.1, 0.0, 0.6, 0.3]), atol=0.03)


def test_sampled_texts_depend_on_seed_and_key_and_not_on_the_batch(model):
    texts = [Text(key, [9]) for key in range(5)]
    first = written(model, texts, 5, Sampler(1))
    assert written(model, [Text(key, [9]) for key in (3, 1)], 2, Sampler(1)) == {key: first[key] for key in (1, 3)}
    assert written(model, [Text(0, [9])], 1, Sampler(2))[0] != first[0]
    assert len({tuple(ids[:8]) for ids in first.values()}) == 5


def test_windows_of_the_models_own_text(model):
    done = []
    with torch.no_grad():
        rows = sample_windows(model, [0], 3, 12, 4, done.append)
        again = sample_windows(model, [0], 2, 12, 4)
    assert rows.shape == (3, 13) and rows.dtype == "int32" and (rows[:, 0] == 0).all() and sum(done) == 36
    assert (rows[:2] == again).all() and len({tuple(row) for row in rows.tolist()}) == 3
    with torch.no_grad():
        assert sample_windows(model, [7, 8, 9], 1, 12, 4)[0, :3].tolist() == [7, 8, 9]
    for start in ([], [1] * 17):
        with pytest.raises(YardstickError, match=f"its start has {len(start)} ids; it may have 1 to 16"):
            sample_windows(model, start, 1, 12, 4)


def test_what_does_not_fit_or_is_no_number_is_refused(model):
    for prompt in ([], list(range(CAPACITY))):
        with pytest.raises(YardstickError, match="does not fit into 64 positions"):
            written(model, [Text(0, prompt)], 2)
    broken = Model.__new__(Model)
    broken.__dict__ |= model.__dict__ | {"gain": model.gain * float("nan")}
    with pytest.raises(NotFiniteError, match="the logits after 0 ids of text 3 are not finite"):
        written(broken, [Text(3, [1, 2])], 2)
