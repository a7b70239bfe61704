"""Our GGUF reader, writer, type choice and importance matrix against `gguf`, `libgguf` and llama.cpp itself."""

from collections import Counter

import gguf
import libgguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.oracle.llama_cpp import logits_of
from yardstick.errors import YardstickError
from yardstick.evaluate.divergence import compare
from yardstick.models.config import ModelConfig, load_config
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states, head_rows
from yardstick.rivals.gguf_types import tensor_type
from yardstick.rivals.gguf_write import write_gguf
from yardstick.rivals.imatrix import column_square_sums, read_imatrix, write_imatrix
from yardstick.sources import audit_source, open_source
from yardstick.sources.gguf import dequantize_gguf, gguf_name
from yardstick.sources.gguf_file import GgufFile
from yardstick.sources.hf import HuggingFaceSource

DECODABLE = sorted(
    {kind for kind in gguf.quants._type_traits if kind in gguf.GGML_QUANT_SIZES} - {Type.F32, Type.F16},
    key=lambda kind: kind.name,
)


def random_blocks(kind: Type, rows: int, columns: int) -> np.ndarray:
    """Bytes of a quantized matrix with distinct, non-zero blocks of ordinary scale."""
    rng = np.random.default_rng(7)
    values = (rng.standard_normal((rows, columns)) * np.linspace(0.5, 2, rows)[:, None]).astype(np.float32)
    importance = rng.random(columns).astype(np.float32) + 0.1
    try:
        return libgguf.quantize_rows(values, int(kind), importance)
    except ValueError:
        return gguf.quants.quantize(values, kind)


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_every_type_decodes_as_the_gguf_package_does(kind, tmp_path):
    """Two super-blocks a row: a reader that stops after the first block must fail."""
    try:
        data = random_blocks(kind, 3, 512)
    except NotImplementedError:
        pytest.skip(f"neither package can make {kind.name} blocks")
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, arch="llama")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(path).tensors["blk.0.ffn_up.weight"]
    expected = gguf.quants.dequantize(data, kind)
    assert np.abs(expected[:, 256:]).max() > 0
    np.testing.assert_allclose(dequantize_gguf(tensor), expected.reshape(3, 512), rtol=2e-6, atol=1e-7)


def test_header_reads_as_the_gguf_package_reads_it(tiny_llama, tmp_path):
    path = tmp_path / "m.gguf"
    make(path, tiny_llama, "Q4_K_M")
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):  # the package's own names for the header
            assert ours.value(key) == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist())) and mine.kind == tensor.tensor_type
        assert mine.data.tobytes() == np.asarray(tensor.data).tobytes()


def smollm2() -> ModelConfig:
    return ModelConfig(
        family="llama",
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tied_head=True,
        qk_norm=False,
        qkv_bias=False,
    )


def test_the_q4_k_m_mix_is_the_one_that_llama_quantize_makes():
    """166 Q5_0, 16 Q4_K, 14 Q6_K, 15 Q8_0: counted in llama.cpp's own output for this model."""
    config = smollm2()
    kinds = Counter(
        tensor_type(gguf_name(name), shape[1], "Q4_K_M", config, True).name
        for name, shape in config.tensors().items()
        if len(shape) == 2
    )
    assert kinds == {"Q5_0": 166, "Q4_K": 16, "Q6_K": 14, "Q8_0": 15}


def test_a_width_that_no_block_fits_is_refused():
    with pytest.raises(YardstickError, match="Q8_0: tensor blk.0.attn_q.weight has 100 columns"):
        tensor_type("blk.0.attn_q.weight", 100, "Q8_0", smollm2(), False)


def make(path, folder, mix, importance=None):
    original = open_folder(folder)
    write_gguf(path, original, mix, importance, threads=2)
    return original.config


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_0", "Q4_K_M", "IQ4_XS"])
def test_reader_gives_back_the_model_in_its_own_row_order(tiny_llama, tmp_path, mix):
    config = make(tmp_path / "m.gguf", tiny_llama, mix)
    source, original = open_source(f"gguf:{tmp_path / 'm.gguf'}"), HuggingFaceSource(tiny_llama)
    audit_source(source, config.tensors())
    limit = 0.01 if mix == "Q8_0" else 0.13
    for name, shape in config.tensors().items():
        ours, theirs = source.get(name), original.get(name).float()
        error = float((ours - theirs).norm() / theirs.norm())
        assert error < limit, f"{name}: {error}"  # a permuted matrix would be near 1.4
        if len(shape) == 2:
            assert error > 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", 6, "key llama.attention.head_count is 6, the model has 3"),
        ("block_count", 3, "key llama.block_count is 3, the model has 2"),
        ("block_count", "2", "key llama.block_count is 2, the model has 2"),
        ("attention.head_count_kv", [3, 3], None),
        ("attention.head_count_kv", [1, 2], r"key llama.attention.head_count_kv is \[1, 2\], the model has"),
        ("rope.freq_base", 500000.0, "key llama.rope.freq_base is 500000.0, the model has 10000.0"),
        ("attention.layer_norm_rms_epsilon", 0.1, "key llama.attention.layer_norm_rms_epsilon is 0.1"),
        (None, "qwen2", "GGUF architecture is qwen2, the model is a llama"),
    ],
)
def test_a_file_that_describes_another_model_is_refused(tiny_llama, tmp_path, monkeypatch, key, value, message):
    path = tmp_path / "m.gguf"
    make(path, tiny_llama, "Q8_0")
    config, real = load_config(tiny_llama), GgufFile.value
    if message is None:  # one for each layer
        value = [config.num_kv_heads] * config.num_layers
    changed = f"llama.{key}" if key else "general.architecture"
    monkeypatch.setattr(
        GgufFile, "value", lambda file, name, *rest: value if name == changed else real(file, name, *rest)
    )
    if message is None:
        monkeypatch.setattr(GgufFile, "number", lambda file, name, *rest: int(real(file, name, *rest)))
        assert open_source(f"gguf:{path}", config)
        return
    with pytest.raises(YardstickError, match=message):
        open_source(f"gguf:{path}", config)


def test_truncated_files_are_refused_by_tensor(tiny_llama, tmp_path):
    make(tmp_path / "m.gguf", tiny_llama, "Q8_0")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-4000])
    with pytest.raises(YardstickError, match="cut.gguf: truncated"):
        open_source(f"gguf:{tmp_path / 'cut.gguf'}")
    (tmp_path / "cut.gguf").write_bytes(data[:500])
    with pytest.raises(YardstickError, match="cut.gguf: truncated or not a GGUF file"):
        open_source(f"gguf:{tmp_path / 'cut.gguf'}")
    with pytest.raises(YardstickError, match="none.gguf: no such file"):
        open_source(f"gguf:{tmp_path / 'none.gguf'}")


def test_one_part_of_a_split_file_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", arch="llama")
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 2)
    writer.add_int32("split.tensors.count", 2)
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(YardstickError, match="m-00002-of-00002.gguf: no such file; it is part 2 of 2"):
        open_source(f"gguf:{tmp_path / 'm-00001-of-00002.gguf'}")


def test_importance_matrix_reads_as_libgguf_reads_it(tiny_llama, tmp_path):
    source, config = HuggingFaceSource(tiny_llama), load_config(tiny_llama)
    input_ids = torch.randint(0, 512, (4, 32))
    sums = column_square_sums(source, config, input_ids, batch=2)
    assert set(sums) == set(config.body_matrices())
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, sums, input_ids.numel(), 32, "t")
    ours, theirs = read_imatrix(path), libgguf.load_imatrix(path)
    assert set(ours) == set(theirs)
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-6)
    first = "model.layers.0.self_attn.q_proj.weight"
    states = source.get("model.embed_tokens.weight").float()[input_ids]
    normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    normed = normed * source.get("model.layers.0.input_layernorm.weight").float()
    expected = normed.square().mean(dim=(0, 1))
    np.testing.assert_allclose(ours[gguf_name(first)], expected.numpy(), rtol=1e-4)


def test_importance_matrix_divides_sums_by_counts(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", arch="")
    writer.add_tensor("blk.0.ffn_up.weight.in_sum2", np.full((1, 32), 100.0, dtype=np.float32))
    writer.add_tensor("blk.0.ffn_up.weight.counts", np.full((1, 1), 40.0, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_imatrix(tmp_path / "i.gguf")["blk.0.ffn_up.weight"].tolist() == [2.5] * 32


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M"])
def test_llama_cpp_runs_our_files_as_we_do(tiny_llama, tmp_path, mix):
    """llama.cpp's own forward on the file that we wrote, against our forward on the file that we read."""
    config = make(tmp_path / "m.gguf", tiny_llama, mix)
    input_ids = torch.randint(0, 512, (1, 60))
    theirs = torch.from_numpy(logits_of(tmp_path / "m.gguf", input_ids[0].numpy()))
    source = open_source(f"gguf:{tmp_path / 'm.gguf'}")
    states = final_hidden_states(source, config, input_ids, torch.float32, 1)
    head = head_rows(source, config)[:]
    result = compare(theirs, torch.eye(theirs.shape[1]), states[0], head, torch.zeros(60))
    original = HuggingFaceSource(tiny_llama)
    plain = final_hidden_states(original, config, input_ids.flip(1), torch.float32, 1)
    unrelated = compare(theirs, torch.eye(theirs.shape[1]), plain[0], head, torch.zeros(60))
    # llama.cpp rounds activations to 8 bits in its products, so the two agree to about 1e-3, not to fp32
    assert float(result.kl.mean()) < 5e-3
    assert float(unrelated.kl.mean()) > 100 * float(result.kl.mean())
