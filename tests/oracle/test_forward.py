"""Our forward against Hugging Face's on tiny models that transformers wrote."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny_model
from yardstick.evaluate.divergence import compare
from yardstick.models.config import load_config
from yardstick.models.prefill import expected_tensors, final_hidden_states, head_weight
from yardstick.sources import audit_source
from yardstick.sources.hf import HuggingFaceSource

CASES = [
    ("llama", True, {}),
    ("llama", False, {"num_key_value_heads": 3, "rope_theta": 500000.0}),
    ("llama", False, {"head_dim": 48}),  # head_dim is not hidden / heads
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
    return states, head_weight(source, config)


def test_logits_agree_in_fp32(model):
    input_ids = torch.randint(0, 512, (3, 77))
    states, head = ours(model, input_ids, torch.float32)
    logits = states @ head.float().T
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids).logits.detach()
    assert float((logits - theirs).norm() / theirs.norm()) <= 1e-4


def test_distributions_agree_in_bf16(model):
    input_ids = torch.randint(0, 512, (3, 77))
    states, head = ours(model, input_ids, torch.bfloat16)
    body = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).model
    theirs = body(input_ids).last_hidden_state.detach()
    labels = torch.zeros(states.shape[0] * states.shape[1], dtype=torch.int64)
    result = compare(theirs.flatten(0, 1), head, states.flatten(0, 1), head, labels)
    assert float(result.kl.mean()) <= 1e-3
    # random tiny models have near-ties that bf16 flips; where the first choice is clear it must agree
    clear = result.reference_top1_probability > 0.1
    assert float((result.top1 == result.reference_top1)[clear].float().mean()) >= 0.98


def test_one_batch_or_many_make_no_difference_beyond_rounding(tiny_llama):
    source, config = HuggingFaceSource(tiny_llama), load_config(tiny_llama)
    input_ids = torch.randint(0, 512, (5, 40))
    one = final_hidden_states(source, config, input_ids, torch.float32, 1)
    many = final_hidden_states(source, config, input_ids, torch.float32, 5)
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)
