"""Qwen3.5 as GGUF: files written here, head by head, as llama.cpp's converter documents its changes.

Six value heads on two key heads: the file's order [0, 3, 1, 4, 2, 5] is not its own inverse, as four heads' would be.
That the order, the norms and the decays are llama.cpp's is proved by its own forward on such a file.
"""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from tests.oracle.llama_cpp import logits_of
from tests.tiny import write_tiny_model
from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig, load_config
from yardstick.models.prefill import final_hidden_states, head_rows
from yardstick.rivals.gguf_write import add_tokenizer
from yardstick.sources import audit_source
from yardstick.sources.gguf import GgufSource
from yardstick.sources.gguf_qwen35 import untile_value_heads

IN_FILE = [0, 3, 1, 4, 2, 5]  # Hugging Face's number of the head at each place of the file
GROUPED = [0, 1, 2, 3, 4, 5]  # no reordering: a file that llama.cpp must not like
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def original_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return {name: tensors[name].numpy().copy() for name in load_config(folder).tensors()}  # a tied head once


def converted(name: str, values: np.ndarray, config: ModelConfig, order: list[int]) -> np.ndarray:
    """What the converter stores for a tensor, one head at a time."""
    module, width, keys = name.split("layers.")[-1].partition(".")[2], config.delta.value_dim, 2 * config.delta.keys
    out = values.copy()
    if module == "linear_attn.in_proj_qkv.weight" or module == "linear_attn.conv1d.weight":
        for place, head in enumerate(order):
            for i in range(width):
                out[keys + place * width + i] = values[keys + head * width + i]
        return out[:, 0, :] if "conv1d" in module else out
    if module == "linear_attn.in_proj_z.weight":
        for place, head in enumerate(order):
            for i in range(width):
                out[place * width + i] = values[head * width + i]
    if module == "linear_attn.out_proj.weight":
        for place, head in enumerate(order):
            for i in range(width):
                out[:, place * width + i] = values[:, head * width + i]
    if module in ("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight", "linear_attn.dt_bias"):
        for place, head in enumerate(order):
            out[place] = values[head]
    if module == "linear_attn.A_log":
        for place, head in enumerate(order):
            out[place] = -np.exp(values[head])
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        out = out + np.float32(1)
    return out


def gguf_name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if layer:
        return f"blk.{layer[1]}.{NAMES[layer[2]]}"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[name]


def write_qwen35(
    path: Path, folder: Path, quantized: dict[str, Type], order: list[int] = IN_FILE, mtp: int = 0, keys=()
) -> dict[str, np.ndarray]:
    """The file, with the tensors whose names end as `quantized` says in those types; returns what it stores."""
    config, heads = load_config(folder), load_config(folder).delta
    writer = gguf.GGUFWriter(path, arch="qwen35")
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers + mtp)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_dimension_sections([2, 1, 1, 0])  # of four frequencies; text has the same position in all
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_ssm_conv_kernel(heads.kernel)
    writer.add_ssm_state_size(heads.key_dim)
    writer.add_ssm_group_count(heads.key_heads)
    writer.add_ssm_time_step_rank(heads.value_heads)
    writer.add_ssm_inner_size(heads.values)
    writer.add_full_attention_interval(4)
    if mtp:
        writer.add_nextn_predict_layers(mtp)
    for key, value in keys:
        writer.add_bool(key, value)
    add_tokenizer(writer, folder, {"eos_token_id": 0, "bos_token_id": 0})
    stored = {}
    for name, values in original_tensors(folder).items():
        stored[name] = converted(name, values, config, order).astype(np.float32)
        kind = next((kind for ending, kind in quantized.items() if name.endswith(ending)), None)
        data = gguf.quants.quantize(stored[name], kind) if kind else stored[name]
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    rng = np.random.default_rng(8)
    for layer in range(config.num_layers, config.num_layers + mtp):
        for name, shape in mtp_tensors(config).items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.random(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def mtp_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """A layer for multi-token prediction: an ordinary attention block and four tensors of its own."""
    hidden, query, key = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "attn_q": (2 * query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "attn_q_norm": (config.head_dim,),
        "attn_k_norm": (config.head_dim,),
        "ffn_gate": (config.intermediate_size, hidden),
        "ffn_up": (config.intermediate_size, hidden),
        "ffn_down": (hidden, config.intermediate_size),
        "nextn.eh_proj": (hidden, 2 * hidden),
        "nextn.enorm": (hidden,),
        "nextn.hnorm": (hidden,),
        "nextn.shared_head_norm": (hidden,),
    }


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Keys of width 16, values of width 24: no mix-up of the two can pass. 144 columns fit no block of 32."""
    return write_tiny_model(tmp_path_factory.mktemp("wide") / "m", "qwen3_5", tied=False, layers=4)


@pytest.fixture(scope="module")
def even(tmp_path_factory) -> Path:
    """Values as wide as keys, as llama.cpp wants them: 96 columns in blocks of 32, two heads in each."""
    folder = tmp_path_factory.mktemp("even") / "m"
    return write_tiny_model(folder, "qwen3_5", tied=True, layers=4, linear_value_head_dim=16)


def test_order_of_value_heads_by_hand():
    """Fault A8."""
    assert untile_value_heads(torch.arange(6), 2, 6).tolist() == [0, 2, 4, 1, 3, 5]
    assert untile_value_heads(torch.tensor(IN_FILE), 2, 6).tolist() == GROUPED
    columns = torch.tensor([[10 * head + i for head in IN_FILE for i in range(2)]])
    assert untile_value_heads(columns, 2, 6, dim=1).tolist() == [[10 * head + i for head in GROUPED for i in range(2)]]


def test_every_tensor_comes_back(wide, tmp_path):
    """Plain tensors are the original's own; 1 + w and -exp(A_log) round once in fp32."""
    write_qwen35(tmp_path / "m.gguf", wide, {})
    source, config = GgufSource(tmp_path / "m.gguf"), load_config(wide)
    audit_source(source, config.tensors())
    assert config.delta.key_dim == 16 and config.delta.value_dim == 24 and not source.ignored()
    for name, expected in original_tensors(wide).items():
        values = source.get(name).numpy()
        if name.endswith("A_log"):
            np.testing.assert_allclose(values, expected, rtol=0, atol=4e-7)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            np.testing.assert_allclose(values, expected, rtol=0, atol=1.2e-7)
        else:
            np.testing.assert_array_equal(values, expected, err_msg=name)


def test_offsets_and_decays_by_hand(wide, tmp_path):
    """Faults A9 and A10: w 0.25 is stored as 1.25, A_log 0 as -1, and -2 means 0.6931."""
    folder = tmp_path / "m"
    folder.mkdir()
    for path in wide.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = {name: np.float32(value) for name, value in original_tensors(wide).items()}
    tensors["model.norm.weight"][:] = 0.25
    tensors["model.layers.0.linear_attn.A_log"][:] = [0, np.log(2), 0, 0, 0, 0]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = write_qwen35(tmp_path / "m.gguf", folder, {})
    assert set(stored["model.norm.weight"]) == {1.25}
    np.testing.assert_allclose(stored["model.layers.0.linear_attn.A_log"], [-1, -1, -2, -1, -1, -1])
    source = GgufSource(tmp_path / "m.gguf")
    assert set(source.get("model.norm.weight").tolist()) == {0.25}
    decays = source.get("model.layers.0.linear_attn.A_log").tolist()
    assert decays == pytest.approx([0, 0.693147, 0, 0, 0, 0], abs=1e-6)


Q8 = {
    "in_proj_qkv.weight": Type.Q8_0,
    "in_proj_z.weight": Type.Q4_0,
    "in_proj_a.weight": Type.Q8_0,
    "out_proj.weight": Type.Q8_0,
    "q_proj.weight": Type.Q8_0,
    "up_proj.weight": Type.BF16,
    "embed_tokens.weight": Type.Q8_0,
}


def test_quantized_tensors_are_put_in_order_after_decoding(even, tmp_path):
    """A block of out_proj spans columns of two heads, which are not neighbours in the original."""
    stored, config = write_qwen35(tmp_path / "m.gguf", even, Q8), load_config(even)
    source = GgufSource(tmp_path / "m.gguf")
    audit_source(source, config.tensors())
    place = {head: place for place, head in enumerate(IN_FILE)}
    for name, kind in (
        (name, kind) for name in config.body_matrices() for end, kind in Q8.items() if name.endswith(end)
    ):
        decoded = gguf.quants.dequantize(gguf.quants.quantize(stored[name], kind), kind)
        rows = np.arange(decoded.shape[0])
        heads = np.concatenate([16 * place[head] + np.arange(16) for head in range(6)])
        if "in_proj_qkv" in name:
            rows = np.concatenate((rows[:64], 64 + heads))
        elif "in_proj_z" in name:
            rows = heads
        expected = decoded[:, heads] if "out_proj" in name else decoded[rows]
        np.testing.assert_array_equal(source.get(name).numpy(), expected, err_msg=name)
        assert source.infos()[name].scheme == kind.name
    a = "model.layers.0.linear_attn.in_proj_a.weight"
    decoded = gguf.quants.dequantize(gguf.quants.quantize(stored[a], Type.Q8_0), Type.Q8_0)
    np.testing.assert_array_equal(source.get(a).numpy(), decoded[[0, 2, 4, 1, 3, 5]])
    assert source.infos()[a].bits == 6 * 3 * 34 * 8
    rows, whole = source.rows("model.embed_tokens.weight"), source.get("model.embed_tokens.weight")
    assert torch.equal(rows[13:60], whole[13:60])


def our_logits(source, config: ModelConfig, input_ids: torch.Tensor) -> torch.Tensor:
    states = final_hidden_states(source, config, input_ids, torch.float32, 1)
    return states[0] @ head_rows(source, config)[:].float().T


def their_logits(folder: Path, input_ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(input_ids=input_ids).logits[0].detach()


def mean_kl(logits: torch.Tensor, other: torch.Tensor) -> float:
    p, q = torch.log_softmax(logits.double(), -1), torch.log_softmax(other.double(), -1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", ["wide", "even"])
def test_our_forward_on_the_file_is_that_of_transformers_on_the_original(name, request, tmp_path):
    folder = request.getfixturevalue(name)
    write_qwen35(tmp_path / "m.gguf", folder, {})
    input_ids = torch.randint(1, 500, (1, 70))
    ours = our_logits(GgufSource(tmp_path / "m.gguf"), load_config(folder), input_ids)
    theirs = their_logits(folder, input_ids)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_llama_cpp_runs_the_file_as_transformers_runs_the_original(even, tmp_path):
    """With heads in the original's order instead, llama.cpp computes something else: the order is its own."""
    write_qwen35(tmp_path / "m.gguf", even, {}, mtp=1)
    write_qwen35(tmp_path / "grouped.gguf", even, {}, order=GROUPED)
    input_ids = torch.randint(1, 500, (1, 70))
    theirs = their_logits(even, input_ids)
    of_file, of_grouped = (
        torch.from_numpy(logits_of(tmp_path / f"{name}.gguf", input_ids[0].numpy())) for name in ("m", "grouped")
    )
    ours = our_logits(GgufSource(tmp_path / "m.gguf"), load_config(even), input_ids)
    assert mean_kl(theirs, of_file) < 1e-5 and mean_kl(of_file, ours) < 1e-5
    assert mean_kl(theirs, of_grouped) > 0.1


def test_llama_cpp_agrees_on_a_quantized_file(even, tmp_path):
    """It rounds activations to 8 bits where weights are quantized, so the two agree less than on plain weights."""
    write_qwen35(tmp_path / "m.gguf", even, Q8)
    input_ids = torch.randint(1, 500, (1, 70))
    of_file = torch.from_numpy(logits_of(tmp_path / "m.gguf", input_ids[0].numpy()))
    ours = our_logits(GgufSource(tmp_path / "m.gguf"), load_config(even), input_ids)
    assert mean_kl(of_file, ours) < 0.01
    assert mean_kl(of_file, their_logits(even, input_ids)) > 0.02  # what the quantization itself does


def test_layers_for_multi_token_prediction_are_set_aside_with_a_reason(even, tmp_path):
    """Fault A11: block_count 5 and one layer to predict are four layers."""
    write_qwen35(tmp_path / "m.gguf", even, {}, mtp=1)
    source, config = GgufSource(tmp_path / "m.gguf"), load_config(even)
    audit_source(source, config.tensors())
    assert config.num_layers == 4 and len(source.ignored()) == 15
    assert source.ignored()["blk.4.nextn.eh_proj.weight"] == "multi-token prediction layer, not measured"
    assert all(name.startswith("blk.4.") for name in source.ignored())


def test_the_prefix_is_the_models_own(even, tmp_path):
    write_qwen35(tmp_path / "m.gguf", even, {})
    source = GgufSource(tmp_path / "m.gguf", prefix="model.language_model.")
    names = {
        name.replace("model.", "model.language_model.", 1): shape for name, shape in load_config(even).tensors().items()
    }
    audit_source(source, names)
    with pytest.raises(YardstickError, match="tensor model.embed_tokens.weight .* is missing"):
        audit_source(source, load_config(even).tensors())


def test_value_heads_that_are_said_not_to_be_tiled_are_refused(even, tmp_path):
    write_qwen35(tmp_path / "m.gguf", even, {}, keys=[("qwen35.ssm.v_head_reordered", True)])
    GgufSource(tmp_path / "m.gguf")
    write_qwen35(tmp_path / "m.gguf", even, {}, keys=[("qwen35.ssm.v_head_reordered", False)])
    with pytest.raises(YardstickError, match="m.gguf: its value heads are not tiled"):
        GgufSource(tmp_path / "m.gguf")


def test_a_decay_that_is_not_negative_is_named(even, tmp_path):
    path = tmp_path / "m.gguf"
    stored = write_qwen35(path, even, {})["model.layers.0.linear_attn.A_log"]
    data = path.read_bytes()
    assert data.count(stored.tobytes()) == 1
    path.write_bytes(data.replace(stored.tobytes(), (-stored).tobytes()))
    with pytest.raises(YardstickError, match="tensor model.layers.0.linear_attn.A_log is not finite"):
        GgufSource(path).get("model.layers.0.linear_attn.A_log")
