"""Prefill, then one position at a time from the caches, is one prefill."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny_model
from yardstick.errors import YardstickError
from yardstick.evaluate.divergence import compare
from yardstick.models.folder import open_folder
from yardstick.models.layers import run_block
from yardstick.models.parts import rotary_table
from yardstick.models.prefill import final_hidden_states, head_rows, load_layer
from yardstick.models.state import LayerState

CASES = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 48},
    "qwen3_5": {"num_hidden_layers": 5},
}


@pytest.fixture(params=CASES, scope="module")
def original(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("decode") / request.param
    return open_folder(
        write_tiny_model(folder, request.param, tied=request.param == "llama", layers=3, **CASES[request.param])
    )


def kl_between(original, one, other):
    head, labels = head_rows(original.source, original.config), torch.zeros(one.shape[0] * one.shape[1]).long()
    return compare(one.flatten(0, 1), head, other.flatten(0, 1), head, labels).kl


@pytest.mark.parametrize("start", [1, 70, 101])
def test_decoding_the_rest_of_a_text_is_prefilling_all_of_it(original, start):
    input_ids = torch.randint(0, 512, (3, 102))
    whole = final_hidden_states(original.source, original.config, input_ids, torch.float32, 3)
    decoded = final_hidden_states(original.source, original.config, input_ids, torch.float32, 3, decode_from=start)
    kl = kl_between(original, whole, decoded)
    assert float(kl.abs().max()) <= 1e-6
    assert not torch.equal(whole[:, start:], decoded[:, start:])  # the other code did run


def test_steps_of_any_size_are_one_prefill(original):
    """5 + 1 + 64 + 32 positions, each from the state before: the mask of a block that has a past, chunks of a rule."""
    config, hidden = original.config, torch.randn(2, 102, 96)
    rotary = rotary_table(config, 102, torch.device("cpu"), torch.float32)
    for layer in range(config.num_layers):
        weights = load_layer(original.source, config, layer, torch.float32, torch.device("cpu"))
        kind = config.layer_kind(layer)
        state, parts = LayerState(102), []
        for part in hidden.split((5, 1, 64, 32), dim=1):
            parts.append(run_block(part, weights, config, kind, rotary, state))
        assert state.length == 102
        torch.testing.assert_close(
            torch.cat(parts, dim=1), run_block(hidden, weights, config, kind, rotary), rtol=1e-4, atol=1e-4
        )


def test_a_full_cache_is_refused(original):
    config, state = original.config, LayerState(4)
    attention = [i for i in range(config.num_layers) if config.layer_kind(i) == "full_attention"][0]
    weights = load_layer(original.source, config, attention, torch.float32, torch.device("cpu"))
    rotary = rotary_table(config, 8, torch.device("cpu"), torch.float32)
    with pytest.raises(YardstickError, match="room for 4 positions, 5 are asked for"):
        run_block(torch.randn(1, 5, 96), weights, config, "full_attention", rotary, state)


def test_our_decode_is_hugging_faces_decode(original):
    """Their generation cache, step by step, against ours."""
    input_ids = torch.randint(1, 500, (2, 80))
    states = final_hidden_states(original.source, original.config, input_ids, torch.float32, 2, decode_from=60)
    model = AutoModelForCausalLM.from_pretrained(original.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(input_ids[:, :60], use_cache=True)
        theirs = [output.logits[:, -1]]
        for position in range(60, 80):
            output = model(
                input_ids[:, position : position + 1], past_key_values=output.past_key_values, use_cache=True
            )
            theirs.append(output.logits[:, -1])
    theirs = torch.stack(theirs, dim=1)
    ours = states[:, 59:] @ head_rows(original.source, original.config)[:].float().T
    assert float((ours - theirs).norm() / theirs.norm()) <= 1e-4
