"""The gated delta net against its definition, and a checkpoint with a vision tower against Hugging Face."""

import json

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.tiny import DELTA, tiny_tokenizer
from yardstick.errors import YardstickError
from yardstick.evaluate import hugging_face
from yardstick.models.config import load_config
from yardstick.models.delta_net import causal_convolution, chunked_delta_rule, recurrent_delta_rule, unit_length
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states, head_rows
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.run_rtn import quantize_model
from yardstick.sources import audit_source, open_source
from yardstick.sources.hf import HuggingFaceSource


def inputs(length):
    query, key = (unit_length(torch.randn(2, length, 3, 16)) for _ in range(2))
    value = torch.randn(2, length, 3, 24)
    return query, key, value, -3 * torch.rand(2, length, 3), torch.rand(2, length, 3)


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 200])
def test_chunks_give_what_the_recurrence_gives(length):
    arguments = inputs(length)
    start = torch.randn(2, 3, 16, 24)
    for state in (None, start):
        outputs, last = chunked_delta_rule(*arguments, state)
        expected, expected_last = recurrent_delta_rule(*arguments, state)
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last, expected_last, rtol=1e-4, atol=1e-5)


def test_decode_goes_on_from_prefill():
    arguments = inputs(100)
    whole, _ = chunked_delta_rule(*arguments)
    _, state = chunked_delta_rule(*(x[:, :70] for x in arguments))
    rest, _ = recurrent_delta_rule(*(x[:, 70:] for x in arguments), state)
    torch.testing.assert_close(rest, whole[:, 70:], rtol=1e-4, atol=1e-5)


def test_strong_decay_does_not_overflow():
    query, key, value, _, beta = inputs(130)
    outputs, state = chunked_delta_rule(query, key, value, torch.full((2, 130, 3), -30.0), beta)
    assert bool(torch.isfinite(outputs).all()) and bool(torch.isfinite(state).all())


def test_convolution_looks_back_only():
    states = torch.zeros(1, 6, 1)
    states[0, 2] = 1.0
    kernel = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
    outputs, window = causal_convolution(states, kernel)
    assert outputs.flatten().tolist() == [0, 0, 1, 2, 3, 4]
    assert window.flatten().tolist() == [0, 0, 0]
    first, window = causal_convolution(states[:, :4], kernel)
    rest, _ = causal_convolution(states[:, 4:], kernel, window)
    assert window.flatten().tolist() == [0, 1, 0]
    assert torch.cat((first, rest), dim=1).flatten().tolist() == outputs.flatten().tolist()


@pytest.fixture(scope="module")
def with_vision(tmp_path_factory):
    torch.manual_seed(4)
    text = DELTA | {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "initializer_range": 0.12,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 96}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("vision") / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def test_the_language_model_inside_a_vision_checkpoint(with_vision):
    config, source = load_config(with_vision), HuggingFaceSource(with_vision)
    audit_source(source, config.tensors())
    assert config.prefix == "model.language_model." and not config.tied_head
    assert set(source.ignored()) and all(name.startswith("model.visual.") for name in source.ignored())
    input_ids = torch.randint(1, 500, (2, 70))
    states = final_hidden_states(source, config, input_ids, torch.float32, 2)
    logits = states @ head_rows(source, config)[:].float().T
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(with_vision, dtype=torch.float32)
    expected = theirs(input_ids=input_ids).logits.detach()
    assert float((logits - expected).norm() / expected.norm()) <= 1e-4


def test_the_noise_floor_reads_a_vision_checkpoint_too(with_vision):
    """Hugging Face's own class for the checkpoint holds the vision tower; its text states are the ones compared."""
    original, input_ids = open_folder(with_vision), torch.randint(1, 500, (2, 70))
    theirs = hugging_face.final_hidden_states(with_vision, input_ids, torch.float32)
    ours = final_hidden_states(original.source, original.config, input_ids, torch.float32, 2)
    assert float((ours - theirs).norm() / theirs.norm()) <= 1e-4


def test_a_hybrid_model_is_quantized_matrix_by_matrix(with_vision, tmp_path):
    config, source = load_config(with_vision), HuggingFaceSource(with_vision)
    recipe = {"method": "rtn", "group_size": 32, "mse": False, "keep_bf16": None}
    writer = PackedWriter(tmp_path, "d")
    writer.finish(quantize_model(source, config, recipe, writer, None), recipe, with_vision)
    packed = open_source(f"packed:{tmp_path}")
    audit_source(packed, config.tensors())
    quantized = {name for name, info in packed.infos().items() if info.scheme == "int4-g32"}
    # three delta layers of 3 + 3 matrices, one attention layer of 4 + 3, the head
    assert len(quantized) == 3 * 6 + 7 + 1
    assert not [name for name in quantized if "in_proj_a" in name or "in_proj_b" in name or "conv1d" in name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_type = yarn is not supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"linear_num_value_heads": 3}, "3 value heads do not share 2 key heads evenly"),
        ({"head_dim": None}, "key 'head_dim' is missing"),
    ],
)
def test_an_option_of_the_family_that_we_lack_is_refused(with_vision, tmp_path, changes, message):
    raw = json.loads((with_vision / "config.json").read_text())
    raw["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(YardstickError, match=message):
        load_config(tmp_path)
