import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from yardstick.errors import YardstickError
from yardstick.files import sha256_file, write_json
from yardstick.models.config import load_config
from yardstick.models.folder import open_folder, open_original
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.grid import Grid, round_to_nearest
from yardstick.quantize.pack import dequantize
from yardstick.rivals.gguf_write import write_gguf
from yardstick.sources import audit_source, open_source
from yardstick.sources.gguf import gguf_name, hf_name, permute_rotary, unpermute_rotary
from yardstick.sources.hf import HuggingFaceSource


def folder_with(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_rotary_permutation_of_one_head_of_eight():
    rows = torch.arange(8.0)[:, None]
    assert permute_rotary(rows, 1).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert unpermute_rotary(rows, 1).flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_rotary_permutation_stays_inside_heads_and_works_on_biases():
    rows = torch.arange(24.0)
    assert permute_rotary(rows, 3)[8:16].tolist() == [8, 12, 9, 13, 10, 14, 11, 15]
    assert torch.equal(unpermute_rotary(permute_rotary(rows, 3), 3), rows)


def test_names_go_both_ways():
    for name in (
        "model.embed_tokens.weight",
        "model.layers.11.self_attn.k_proj.bias",
        "model.layers.0.post_attention_layernorm.weight",
        "lm_head.weight",
    ):
        assert hf_name(gguf_name(name)) == name
    assert hf_name("blk.3.ssm_a") is None
    with pytest.raises(YardstickError, match="model.visual.patch.weight has no known GGUF name"):
        gguf_name("model.visual.patch.weight")


def test_missing_misshapen_and_left_over_tensors_are_named(tmp_path):
    source = HuggingFaceSource(folder_with(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4)}))
    audit_source(source, {"a": (2, 3), "b": (4,)})
    with pytest.raises(YardstickError, match="tensor c is missing"):
        audit_source(source, {"a": (2, 3), "b": (4,), "c": (1,)})
    with pytest.raises(YardstickError, match=r"tensor a has shape \[2, 3\], the model's config asks for \[3, 2\]"):
        audit_source(source, {"a": (3, 2), "b": (4,)})
    with pytest.raises(YardstickError, match="tensor b is left over"):
        audit_source(source, {"a": (2, 3)})
    with pytest.raises(YardstickError, match="tensor zz is missing"):
        source.get("zz")


def test_nan_is_named_with_its_position(tmp_path):
    bad = torch.ones(3, 4)
    bad[2, 1] = float("nan")
    source = HuggingFaceSource(folder_with(tmp_path, {"a": bad}))
    with pytest.raises(YardstickError, match=r"tensor a is not finite at \[2, 1\] \(nan\)"):
        source.get("a")


def test_truncated_safetensors_are_refused(tmp_path):
    path = folder_with(tmp_path, {"a": torch.randn(64, 64)}) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(YardstickError, match="model.safetensors: truncated or not a safetensors file"):
        HuggingFaceSource(tmp_path)
    path.write_bytes(b"abc")
    with pytest.raises(YardstickError, match="truncated or not a safetensors file"):
        HuggingFaceSource(tmp_path)


def test_folder_without_weights_and_unknown_kinds(tmp_path):
    with pytest.raises(YardstickError, match="holds no model.safetensors and no"):
        open_source(f"hf:{tmp_path}")
    with pytest.raises(YardstickError, match="source exl9:x: must be one of awq:PATH, bf16dir:PATH, bnb:PATH, ct:PATH"):
        open_source("exl9:x")
    with pytest.raises(YardstickError, match="model.safetensors.index.json: no such file"):
        open_source(f"packed:{tmp_path}")


def packed_checkpoint(folder, weights, group_size):
    (folder / "model").mkdir()
    writer = PackedWriter(folder / "packed", "d")
    codes, scales, minima = round_to_nearest(weights, Grid(group_size))
    writer.add_quantized("x.weight", codes, scales, minima, group_size)
    writer.add_plain("n.weight", torch.ones(5, dtype=torch.bfloat16))
    writer.finish_shard("only")
    writer.finish(["only"], {"method": "rtn"}, folder / "model")
    return dequantize(codes, scales, minima, group_size)


def test_packed_source_gives_the_contract_and_its_bits(tmp_path):
    expected = packed_checkpoint(tmp_path, torch.randn(6, 70), 32)
    source = open_source(f"packed:{tmp_path / 'packed'}")
    assert torch.equal(source.get("x.weight"), expected)
    info = source.infos()["x.weight"]
    assert info.scheme == "int4-g32" and info.shape == (6, 70)
    assert info.bits == 6 * (70 * 4 + 3 * 32)
    assert source.infos()["n.weight"].bits == 80


def test_packed_source_decodes_a_file_written_by_hand(tmp_path):
    """Not by our writer: bytes, scales and minima worked out on paper."""
    tensors = {
        "x.weight_codes": torch.tensor([[0x21, 0xF3]], dtype=torch.uint8),
        "x.weight_scales": torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16),
        "x.weight_minima": torch.tensor([[-1.0, 3.0]], dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "s.safetensors")
    packing = {"tensors": {"x.weight": {"group_size": 2, "shape": [1, 4]}}}
    index = {"metadata": {"yardstick": packing}, "weight_map": dict.fromkeys(tensors, "s.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_source(f"packed:{tmp_path}").get("x.weight").tolist() == [[-0.5, 0.0, 9.0, 33.0]]


def test_packed_checkpoint_that_lost_a_part_is_refused(tmp_path):
    packed_checkpoint(tmp_path, torch.randn(6, 70), 32)
    path = tmp_path / "packed" / "only.safetensors"
    tensors = load_file(path)
    del tensors["x.weight_minima"]
    save_file(tensors, path)
    with pytest.raises(YardstickError, match="tensor x.weight_minima is missing"):
        open_source(f"packed:{tmp_path / 'packed'}")


def test_a_damaged_shard_is_not_measured(tmp_path):
    packed_checkpoint(tmp_path, torch.randn(6, 70), 32)
    path = tmp_path / "packed" / "only.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 0x55
    path.write_bytes(data)
    source = open_source(f"packed:{tmp_path / 'packed'}")
    for read in (source.get, lambda name: source.rows(name)[:2]):
        with pytest.raises(YardstickError, match="only.safetensors: its sha256 is not the one on record"):
            read(next(iter(source.infos())))


def model_with_manifest(tmp_path, tiny_llama) -> Path:
    shutil.copytree(tiny_llama, tmp_path / "model")
    files = {path.name: sha256_file(path) for path in (tmp_path / "model").iterdir()}
    write_json(tmp_path / "manifest.json", {"folder": "model", "files": files})
    return tmp_path / "manifest.json"


def test_a_model_file_that_changed_is_not_used(tmp_path, tiny_llama):
    manifest = model_with_manifest(tmp_path, tiny_llama)
    assert open_original(manifest).source.get("model.norm.weight").shape == (96,)
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-9] ^= 0x55
    weights.write_bytes(data)
    original = open_original(manifest)  # weights are checked when they are first read
    with pytest.raises(YardstickError, match="model.safetensors: its sha256 is not the one on record"):
        original.source.get("model.norm.weight")
    with pytest.raises(YardstickError, match="model.safetensors: its sha256 is not the one on record"):
        original.source.reader.check_all()
    (tmp_path / "model" / "tokenizer.json").write_bytes(b"two")
    with pytest.raises(YardstickError, match="file tokenizer.json is not the one that .* was made of"):
        open_original(manifest)
    for content, message in (("{}", "key 'folder' is missing"), ("[]", "holds a list"), ("{", "not valid JSON")):
        manifest.write_text(content)
        with pytest.raises(YardstickError, match=message):
            open_original(manifest)


def test_rows_are_those_of_the_whole(tiny_llama, tmp_path):
    """Of every format that reads by rows, at slices that end inside, at and beyond the last row."""
    original = open_folder(tiny_llama)
    write_gguf(tmp_path / "m.gguf", original, "Q4_0", None, threads=1)
    packed_checkpoint(tmp_path, torch.randn(61, 70), 32)
    packed = open_source(f"packed:{tmp_path / 'packed'}")
    name = "model.embed_tokens.weight"
    cases = [(original.source, name), (open_source(f"gguf:{tmp_path / 'm.gguf'}"), name)]
    for source, name in [*cases, (packed, next(iter(packed.infos())))]:
        whole, rows = source.get(name), source.rows(name)
        assert len(rows) == len(whole)
        for part in (slice(0, 7), slice(13, 60), slice(None), slice(40, 10_000)):
            assert torch.equal(rows[part], whole[part])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_parameters and rope_scaling differ"),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_type = linear is not supported .supported: default, llama3",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type = yarn is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "key 'factor' is missing"),
        ({"rope_parameters": {"rope_type": "default", "type": "linear"}}, "rope_type is default and type is linear"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by kind of layer are not supported"),
        ({"rope_theta": 5e5}, "rope_theta is given as 10000.0 and as 500000.0"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 77.0}}, "rope_theta is given as 10000.0 and as 77.0"),
        ({"rope_parameters": "x"}, "must be objects"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types = sliding_attention is not supported"),
        ({"layer_types": 7}, "layer_types is 7, not a list"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu is not supported"),
        ({"rms_norm_eps": None}, "key 'rms_norm_eps' is missing"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a positive number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2', not a whole number"),
        ({"num_key_value_heads": 1.0}, "num_key_value_heads is 1.0, not a whole number"),
        ({"num_key_value_heads": 2}, "3 attention heads do not share 2 key heads evenly"),
        ({"head_dim": 32.0}, "head_dim is 32.0, not a whole number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"model_type": "qwen3", "head_dim": None}, "key 'head_dim' is missing"),
        ({"model_type": "qwen3_5", "text_config": [1]}, "text_config is not an object"),
        ({"model_type": "mamba"}, "model_type mamba is not supported"),
    ],
)
def test_a_config_that_the_forward_does_not_follow_is_refused(tiny_llama, tmp_path, changes, message):
    raw = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(YardstickError, match=message):
        load_config(tmp_path)


def test_a_shard_of_another_recipe_is_not_resumed_from(tmp_path):
    writer = PackedWriter(tmp_path, "one")
    writer.add_plain("n.weight", torch.ones(5))
    writer.finish_shard("layer-00000")
    assert writer.has_shard("layer-00000")
    assert not PackedWriter(tmp_path, "two").has_shard("layer-00000")
    path = tmp_path / "layer-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert not writer.has_shard("layer-00000")


def test_dither_stays_inside_the_rounding_cell_and_depends_on_the_name():
    from yardstick.retrieve.dither import uniform_cell_offsets

    offsets = uniform_cell_offsets(100_000, 0, "blk.0.attn_q.weight")
    assert offsets.min() >= -0.5 and offsets.max() < 0.5
    assert abs(offsets.mean()) < 0.005 and abs(offsets.std() - np.sqrt(1 / 12)) < 0.002
    assert not np.array_equal(offsets[:9], uniform_cell_offsets(9, 0, "blk.1.attn_q.weight"))
    assert np.array_equal(offsets[:9], uniform_cell_offsets(9, 0, "blk.0.attn_q.weight"))
