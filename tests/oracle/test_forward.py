"""Our forward against Hugging Face's on tiny models that transformers wrote."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny_model
from yardstick.evaluate.divergence import compare
from yardstick.models.config import load_config
from yardstick.models.parts import rotary_frequencies
from yardstick.models.prefill import expected_tensors, final_hidden_states, head_rows
from yardstick.sources import audit_source
from yardstick.sources.hf import HuggingFaceSource

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CASES = [
    ("llama", True, {}),
    ("llama", False, {"num_key_value_heads": 3, "rope_theta": 500000.0}),
    ("llama", False, {"head_dim": 48}),  # head_dim is not hidden / heads
    ("llama", True, {"rope_parameters": LLAMA3, "max_position_embeddings": 512}),
    ("qwen2", True, {"head_dim": None}),
    ("qwen2", False, {"head_dim": None}),
    ("qwen3", False, {"head_dim": 48}),
    ("qwen3", True, {"num_attention_heads": 6, "num_key_value_heads": 2}),
    ("qwen3_5", False, {"num_hidden_layers": 4}),
    ("qwen3_5", True, {"num_hidden_layers": 5, "linear_num_key_heads": 3, "linear_num_value_heads": 3}),
]


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]}-{'tied' if c[1] else 'untied'}-{len(c[2])}")
def model(request, tmp_path):
    family, tied, changes = request.param
    changes = {key: value for key, value in changes.items() if value is not None} | (
        {} if changes.get("head_dim", 0) is not None else {"head_dim": 32}
    )
    return write_tiny_model(tmp_path / family, family, tied, seed=3, layers=3, **changes)


def ours(folder, input_ids, dtype):
    source, config = HuggingFaceSource(folder), load_config(folder)
    audit_source(source, expected_tensors(config, source))
    states = final_hidden_states(source, config, input_ids, dtype, batch_chunks=2)
    return states, head_rows(source, config)[:]


def test_logits_agree_in_fp32(model):
    input_ids = torch.randint(0, 512, (3, 77))
    states, head = ours(model, input_ids, torch.float32)
    logits = states @ head.float().T
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids).logits.detach()
    assert float((logits - theirs).norm() / theirs.norm()) <= 1e-4


def test_distributions_agree_in_bf16(model):
    """At every position, near-ties of a random model included: bf16 arithmetic in the same order rounds alike."""
    input_ids = torch.randint(0, 512, (3, 77))
    states, head = ours(model, input_ids, torch.bfloat16)
    body = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).model
    theirs = body(input_ids).last_hidden_state.detach()
    labels = torch.zeros(states.shape[0] * states.shape[1], dtype=torch.int64)
    result = compare(theirs.flatten(0, 1), head, states.flatten(0, 1), head, labels)
    assert float(result.kl.mean()) <= 1e-3
    assert float((result.top1 == result.reference_top1).float().mean()) >= 0.99


def test_llama3_frequencies_are_transformers(tmp_path):
    folder = write_tiny_model(tmp_path / "m", "llama", True, rope_parameters=LLAMA3, max_position_embeddings=512)
    theirs = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    ours = rotary_frequencies(load_config(folder))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    ratio = rotary_frequencies(replace(load_config(folder), rope_scaling=None)) / ours
    assert float(ratio.min()) == 1.0 and float(ratio.max()) == 8.0 and bool(((ratio > 1.2) & (ratio < 7.8)).any())
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_scaling"] = raw.pop("rope_parameters")  # as transformers 4 wrote it
    raw["rope_theta"] = raw["rope_scaling"].pop("rope_theta")
    (folder / "config.json").write_text(json.dumps(raw))
    assert torch.equal(rotary_frequencies(load_config(folder)), ours)


def test_one_batch_or_many_make_no_difference_beyond_rounding(tiny_llama):
    source, config = HuggingFaceSource(tiny_llama), load_config(tiny_llama)
    input_ids = torch.randint(0, 512, (5, 40))
    one = final_hidden_states(source, config, input_ids, torch.float32, 1)
    many = final_hidden_states(source, config, input_ids, torch.float32, 5)
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)
