"""The dither's steps against ggml's decoders, and a small qwen2 release against transformers' reading of its GGUF."""

import json
from pathlib import Path

import gguf
import libgguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from tests.tiny import write_tiny_model
from yardstick.errors import YardstickError
from yardstick.models.config import load_config
from yardstick.retrieve.dither import ROWS_AT_ONCE, block_steps, dither_tensor, dithered, uniform_cell_offsets
from yardstick.retrieve.release import write_release
from yardstick.sources.gguf import dequantize_gguf, gguf_name
from yardstick.sources.gguf_file import GgufFile, GgufTensor
from yardstick.sources.hf import HuggingFaceSource

# type -> the bytes of a block that are codes, and by how much each bit of a code raises it
CODES = {
    Type.Q4_1: (range(4, 20), [1, 2, 4, 8]),
    Type.Q5_0: (range(2, 22), [1, 2, 4, 8, 16]),
    Type.Q8_0: (range(2, 34), [1, 2, 4, 8, 16, 32, 64, -128]),
    Type.Q4_K: (range(16, 144), [1, 2, 4, 8]),
    Type.Q6_K: (range(192), [1, 2, 4, 8, 16, 32]),
}
HALVES = {Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q8_0: (0,), Type.Q4_K: (0, 2), Type.Q6_K: (208,)}


def two_blocks(kind: Type) -> np.ndarray:
    """Bytes of two blocks: all scales differ, one step is negative, and powers of two make every value exact."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(3).integers(0, 256, (2, size), dtype=np.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = np.array([[0.5], [-0.125]], dtype=np.float16).view(np.uint8)
    if kind == Type.Q6_K:
        scales = np.array([range(1, 17), range(40, 56)], dtype=np.int8)
        blocks[:, 192:208] = (scales * (-1) ** np.arange(16, dtype=np.int8)).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.name)
def test_a_code_that_moves_by_one_moves_its_value_by_the_step(kind):
    """Every bit of every code is turned over: one value moves, by as many steps as the bit stands for. Nothing here
    knows where a block keeps the code or the scale of which position."""
    blocks, (places, raises) = two_blocks(kind), CODES[kind]
    bits = [(block, at, bit) for block in range(2) for at in places for bit in range(8)]
    changed = np.repeat(blocks.reshape(1, -1), len(bits), axis=0)
    up = np.empty(len(bits))
    for row, (block, at, bit) in enumerate(bits):
        at += block * blocks.shape[1]
        up[row] = -1 if changed[row, at] >> bit & 1 else 1
        changed[row, at] ^= 1 << bit
    count = 2 * gguf.GGML_QUANT_SIZES[kind][0]
    steps = block_steps(GgufTensor("w", (1, count), kind, blocks.reshape(-1)))[0]
    assert len(set(steps)) >= 2 and (steps != 0).all() and (steps < 0).any()
    before, after = (gguf.quants.dequantize(data, kind).reshape(-1, count) for data in (blocks, changed))
    assert np.array_equal(after, libgguf.dequantize_rows(changed, int(kind), count))
    rows, positions = np.nonzero(after != before.reshape(1, count))
    assert np.array_equal(rows, np.arange(len(bits)))  # each bit moves one value
    moved = (after[rows, positions] - before.reshape(-1)[positions]) * up / steps[positions]
    for position in range(count):
        assert sorted(moved[positions == position]) == sorted(raises), position


def test_a_tensor_drawn_in_slices_is_the_one_drawn_at_once():
    rows = ROWS_AT_ONCE + 3
    values = np.random.default_rng(0).normal(size=(rows, 32)).astype(np.float32)
    tensor = GgufTensor("w", values.shape, Type.Q5_0, libgguf.quantize_rows(values, int(Type.Q5_0), None).reshape(-1))
    assert torch.equal(dither_tensor(tensor, 7), torch.from_numpy(dithered(tensor, 7, 0)).bfloat16())
    assert np.array_equal(uniform_cell_offsets(5, 7, "w", 3), uniform_cell_offsets(8, 7, "w")[3:])


def test_a_type_of_uneven_steps_is_refused():
    with pytest.raises(YardstickError, match="tensor w has type IQ4_NL, only Q4_1, Q5_0, Q8_0, Q4_K, Q6_K can"):
        block_steps(GgufTensor("w", (1, 32), Type.IQ4_NL, np.zeros(18, np.uint8)))


TYPES = {"embed_tokens": Type.Q5_0, "v_proj": Type.Q8_0, "up_proj": Type.Q4_K, "down_proj": Type.Q6_K}
TEXT = "It's 1234 apples,\n\n  WE'LL say: caf\u00e9 x**2 \u65e5\u672c <tool_call>7</tool_call><|endoftext|> end  "
USER_DEFINED = {512: "<tool_call>", 513: "</tool_call>"}


def write_qwen2_gguf(path: Path, folder: Path, head: torch.Tensor | None) -> None:
    """A qwen2 file of several types by the gguf package, with llama.cpp's names of keys; `head` as a second copy."""
    config, source = load_config(folder), HuggingFaceSource(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    tokens += [USER_DEFINED.get(i, f"[PAD{i}]") for i in range(len(tokens), config.vocab_size)]
    writer = gguf.GGUFWriter(path, arch="qwen2")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * 511, *[4] * len(USER_DEFINED), *[5] * (len(tokens) - 512 - len(USER_DEFINED))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_chat_template("{{ messages }}")
    for name in config.tensors():
        values = source.get(name).float().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        kind = TYPES.get(name.split(".")[-2], Type.Q5_0)
        writer.add_tensor(gguf_name(name), libgguf.quantize_rows(values, int(kind), None), raw_dtype=kind)
    if head is not None:
        data = libgguf.quantize_rows(head.float().numpy(), int(Type.Q8_0), None)
        writer.add_tensor("output.weight", data, raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("qwen2") / "model"
    return write_tiny_model(folder, "qwen2", True, vocab_size=520, rope_theta=1e6, **shape)


@pytest.fixture(scope="module")
def release(original) -> Path:
    path = original.parent / "release.gguf"
    write_qwen2_gguf(path, original, HuggingFaceSource(original).get("model.embed_tokens.weight"))
    return path


def test_a_qwen2_release_is_the_model_that_transformers_reads_from_the_file(release, original, tmp_path):
    write_release(release, tmp_path / "model", None, tied_head=True)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(release.parent, gguf_file=release.name, dtype=torch.float32)
    assert load_config(tmp_path / "model") == load_config(original)
    assert ours.lm_head.weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr()
    head, plain = theirs.lm_head.weight, theirs.state_dict()
    assert not torch.equal(head, theirs.model.embed_tokens.weight)  # the file's two copies
    for name, value in ours.state_dict().items():
        expected = head if name == "model.embed_tokens.weight" else plain[name]
        assert torch.equal(value, expected.bfloat16()), name


def test_a_tied_head_is_drawn_once_from_the_finer_copy(release, tmp_path):
    write_release(release, tmp_path / "model", 0, tied_head=True)
    tensors, drawn = GgufFile(release).tensors, HuggingFaceSource(tmp_path / "model")
    for name in ("model.embed_tokens.weight", *(f"model.layers.1.mlp.{kind}_proj.weight" for kind in ("up", "down"))):
        tensor = tensors["output.weight" if "embed" in name else gguf_name(name)]
        step, value = torch.from_numpy(block_steps(tensor)).abs(), drawn.get(name).float()
        moved = (value - torch.from_numpy(dequantize_gguf(tensor))).abs()
        assert bool((moved <= step / 2 + value.abs() * 2**-8).all()), name  # and the rounding to bf16
        # uniform in the cell; the rounding adds a little where steps are as fine as those of Q8_0
        assert float((moved.square().sum() / step.square().sum()).sqrt()) == pytest.approx(12**-0.5, rel=0.06)
    bias = "model.layers.0.self_attn.k_proj.bias"
    assert torch.equal(drawn.get(bias), torch.from_numpy(dequantize_gguf(tensors[gguf_name(bias)])).bfloat16())


def test_a_head_of_its_own_stays_one_unless_the_config_ties_it(original, release, tmp_path):
    embedding = HuggingFaceSource(original).get("model.embed_tokens.weight")
    other, without = tmp_path / "other.gguf", tmp_path / "without.gguf"
    write_qwen2_gguf(other, original, embedding.flip(1))
    write_qwen2_gguf(without, original, None)
    write_release(other, tmp_path / "untied", None)
    untied = HuggingFaceSource(tmp_path / "untied")
    assert not load_config(tmp_path / "untied").tied_head
    assert not torch.equal(untied.get("lm_head.weight"), untied.get("model.embed_tokens.weight"))
    with pytest.raises(YardstickError, match="token_embd.weight and output.weight are not one matrix"):
        write_release(other, tmp_path / "tied", None, tied_head=True)
    with pytest.raises(YardstickError, match="tied_head is for a file that has both"):
        write_release(without, tmp_path / "tied", None, tied_head=True)
    assert not (tmp_path / "tied").exists()


def test_the_qwen2_tokenizer_is_the_one_of_transformers(release, original, tmp_path):
    write_release(release, tmp_path / "model", None, tied_head=True)
    ours = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    model = json.loads((original / "tokenizer.json").read_text())["model"]
    theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    theirs.add_tokens(list(USER_DEFINED.values()))
    ids = ours.encode(TEXT).ids
    assert ids == theirs.encode(TEXT) and {0, 512, 513} <= set(ids)
    assert ours.decode(ids, skip_special_tokens=False) == TEXT
    assert ours.decode(ids) == TEXT.replace("<|endoftext|>", "")  # what a user defined is text
    assert ours.encode("cafe\u0301").ids == ours.encode("caf\u00e9").ids  # NFC
    assert ours.get_vocab_size() == 514 and ours.token_to_id("[PAD515]") is None
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert settings["unk_token"] is None and settings["eos_token"] == "<|endoftext|>"
    assert settings["model_max_length"] == 256
