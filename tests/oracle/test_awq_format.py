"""AutoAWQ checkpoints written by hand, bit by bit, and through the reader of compressed-tensors."""

import tempfile

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.test_gptq_format import expected, write_checkpoint
from tests.unit.test_unpack_bits import pack, pack_stream
from yardstick.errors import YardstickError
from yardstick.sources.awq import AwqSource

PLAIN = {"quant_method": "awq", "bits": 4, "group_size": 4, "zero_point": True, "version": "gemm"}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output at each position of a word, from its lowest bits


def interleave(codes) -> torch.Tensor:
    """int32 words of 4-bit codes along the last axis: position p of a word holds output ORDER[p] of its eight."""
    codes = np.asarray(codes)
    padded = np.zeros((len(codes), -(-codes.shape[1] // 8) * 8), dtype=int)
    padded[:, : codes.shape[1]] = codes
    rows = []
    for row in padded:
        stream = [row[8 * word + ORDER[position]] for word in range(len(row) // 8) for position in range(8)]
        rows.append(pack_stream(stream, 4))
    return torch.tensor(rows, dtype=torch.int32)


def gemm(codes, zeros, scales, name="m") -> dict[str, torch.Tensor]:
    """Tensors of one module: codes [in, out], zero points and scales [groups, out]."""
    return {
        f"{name}.qweight": interleave(codes),
        f"{name}.qzeros": interleave(zeros),
        f"{name}.scales": torch.tensor(np.asarray(scales), dtype=torch.float16),
    }


def gemv(codes, zeros, scales, zero_words) -> dict[str, torch.Tensor]:
    """The same module for `gemv`; what lies in the padding is not zero."""
    groups, out = np.asarray(zeros).shape
    padded = np.full((out, 8 * zero_words), 11)
    padded[:, :groups] = np.asarray(zeros).T
    factors = np.full((out, 8 * zero_words), 77.0)
    factors[:, :groups] = np.asarray(scales).T
    return {
        "m.qweight": pack(np.asarray(codes).T, 4, axis=1),
        "m.qzeros": pack(padded, 4, axis=1),
        "m.scales": torch.tensor(factors, dtype=torch.float16),
    }


def random_module(rng, rows, out, groups):
    codes, zeros = rng.integers(0, 16, (rows, out)), rng.integers(0, 16, (groups, out))
    return codes, zeros, np.float16(rng.uniform(0.01, 3, (groups, out)))


def test_b5_outputs_are_interleaved_and_zero_points_too(tmp_path):
    codes, zeros = [range(8), range(8, 16)], [[3, 1, 4, 1, 5, 9, 2, 6]]
    scales = [[0.5, 1, 2, 4, 8, 16, 32, 64]]
    tensors = gemm(codes, zeros, scales)
    assert tensors["m.qweight"].tolist()[0] == [0x75316420]
    source = AwqSource(write_checkpoint(tmp_path, PLAIN, tensors))
    assert source.get("m.weight")[:, 0].tolist() == [-1.5, 0, -4, 8, -8, -64, 128, 64]
    assert torch.equal(source.get("m.weight"), expected(codes, zeros, scales, [0, 0]))
    assert source.infos()["m.weight"].scheme == "awq-int4-g4"
    assert source.infos()["m.weight"].bits == 2 * 32 + 32 + 8 * 16


def test_b5_gemv_is_not_interleaved(tmp_path):
    codes = np.arange(64)[:, None] * [1, 3] % 16
    zeros, scales = [[3, 8], [1, 15]], [[0.5, 1], [2, 4]]
    tensors = gemv(codes, zeros, scales, zero_words=4)
    assert tensors["m.qweight"].tolist()[0][0] == 0x76543210
    source = AwqSource(write_checkpoint(tmp_path, PLAIN | {"version": "GEMV", "group_size": 32}, tensors))
    assert torch.equal(source.get("m.weight"), expected(codes, zeros, scales, [i // 32 for i in range(64)]))
    assert source.infos()["m.weight"].bits == 2 * 8 * 32 + 2 * 4 * 32 + 2 * 32 * 16


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 37), st.sampled_from([-1, 1, 3, 8, 32]), st.integers(0, 2**32 - 1))
def test_any_size_decodes_as_written(rows, out, size, seed):
    groups = 1 if size == -1 else -(-rows // size)
    codes, zeros, scales = random_module(np.random.default_rng(seed), rows, out, groups)
    tensors = gemm(codes, zeros, scales) | {"m.bias": torch.arange(float(out))}
    with tempfile.TemporaryDirectory() as folder:
        source = AwqSource(write_checkpoint(folder, PLAIN | {"group_size": size}, tensors))
        assert source.infos()["m.weight"].shape == (out, rows)
        assert source.infos()["m.weight"].bits == sum(8 * t.nbytes for n, t in tensors.items() if n != "m.bias")
        g_idx = [i // (rows if size == -1 else size) for i in range(rows)]
        assert torch.equal(source.get("m.weight"), expected(codes, zeros, scales, g_idx))
        assert torch.equal(source.get("m.bias"), tensors["m.bias"])


@pytest.mark.parametrize(("size", "groups", "words"), [(32, 3, 4), (32, 33, 8), (64, 9, 2), (64, 17, 4), (128, 9, 2)])
def test_padding_of_gemv(tmp_path, size, groups, words):
    codes, zeros, scales = random_module(np.random.default_rng(size), size * groups, 3, groups)
    tensors = gemv(codes, zeros, scales, words)
    quantization = PLAIN | {"version": "gemv", "group_size": size}
    found = AwqSource(write_checkpoint(tmp_path, quantization, tensors)).get("m.weight")
    assert torch.equal(found, expected(codes, zeros, scales, [i // size for i in range(size * groups)]))
    tensors["m.qzeros"] = torch.cat([tensors["m.qzeros"]] * 2, dim=1)
    message = rf"tensor m.qzeros has shape \[3, {2 * words}\], but version gemv .* asks for \[3, {words}\]"
    with pytest.raises(YardstickError, match=message):
        AwqSource(write_checkpoint(tmp_path, quantization, tensors))


def test_compressed_tensors_reads_the_same_weights(tmp_path):
    """Its converter of AutoAWQ checkpoints gives codes, scales and zero points, all minus eight."""
    codes, zeros, scales = random_module(np.random.default_rng(7), 600, 24, 19)
    tensors = gemm(codes, zeros, scales)
    found = AwqSource(write_checkpoint(tmp_path, PLAIN | {"group_size": 32}, tensors)).get("m.weight")
    theirs = AutoAWQConverter(group_size=32).process(dict(tensors))
    levels = unpack_from_int32(theirs["m.weight_packed"], 4, torch.Size((24, 600))).float()
    points = unpack_from_int32(theirs["m.weight_zero_point"], 4, torch.Size((24, 19)), packed_dim=0).float()
    group = torch.arange(600) // 32
    assert torch.equal(found, (levels - points[:, group]) * theirs["m.weight_scale"].float()[:, group])


def test_what_is_quantized_is_what_the_file_holds(tmp_path):
    codes, zeros, scales = random_module(np.random.default_rng(2), 4, 8, 1)
    tensors = gemm(codes, zeros, scales, name="layers.1.mlp.gate_proj")
    tensors |= {"layers.1.mlp.gate.weight": torch.randn(2, 4).half(), "lm_head.weight": torch.randn(2, 4).bfloat16()}
    listed = ["gate", "gat", "mlp.gate", "ate_proj", "lm_head", "layers.1.mlp.gate_pro"]
    source = AwqSource(write_checkpoint(tmp_path, PLAIN | {"modules_to_not_convert": listed}, tensors))
    schemes = {name: info.scheme for name, info in source.infos().items()}
    assert schemes == {
        "layers.1.mlp.gate_proj.weight": "awq-int4-g4",
        "layers.1.mlp.gate.weight": "f16",
        "lm_head.weight": "bf16",
    }
    for entry in ("gate_proj", "mlp", "layers.1", "layers.1.mlp.gate_proj"):
        message = f"tensor layers.1.mlp.gate_proj.qweight is quantized, but modules_to_not_convert has {entry}"
        with pytest.raises(YardstickError, match=message):
            AwqSource(write_checkpoint(tmp_path, PLAIN | {"modules_to_not_convert": [entry]}, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "config.json: quant_method gptq is not awq"),
        ({"version": "gemv_fast"}, "config.json: version gemv_fast is not supported"),
        ({"version": "marlin"}, "version marlin is not supported"),
        ({"backend": "llm-awq"}, "version gemm and llm-awq is not supported"),
        ({"checkpoint_format": "gemv"}, "version gemm and gemv is not supported"),
        ({"pack_method": "reorder"}, "pack_method reorder of AMD Quark under awq is not supported"),
        ({"bits": 8}, "config.json: bits 8 is not supported"),
        ({"group_size": None}, "config.json: group_size None is not a size"),
        ({"version": "gemv"}, "m.qweight: version gemv has no layout for 8 inputs in groups of 4"),
        ({"version": "gemv", "group_size": -1}, "m.qweight: version gemv has no layout for 8 inputs in groups of 8"),
        ({"group_size": 2}, r"m.scales has shape \[1, 8\], but .* 4 inputs in groups of 2 asks for \[2, 8\]"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, changes, message):
    codes, zeros, scales = random_module(np.random.default_rng(2), 4, 8, 1)
    with pytest.raises(YardstickError, match=message):
        AwqSource(write_checkpoint(tmp_path, PLAIN | changes, gemm(codes, zeros, scales)))


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("qweight", None, "tensor m.qweight is missing"),
        ("qzeros", None, "tensor m.qzeros is missing"),
        ("scales", None, "tensor m.scales is missing"),
        ("scales", torch.ones(1, 9).half(), r"tensor m.qweight has shape \[4, 1\], but 9 columns .* asks for \[4, 2\]"),
        ("scales", torch.ones(1, 8).int(), "tensor m.scales has type I32, not F16"),
        ("qweight", torch.ones(4, 2).short(), "tensor m.qweight has type I16, not I32"),
        ("qzeros", torch.ones(1, 2).int(), r"tensor m.qzeros has shape \[1, 2\], but .* asks for \[1, 1\]"),
        ("scales", torch.full((1, 8), float("nan")).half(), "tensor m.weight is not finite"),
    ],
)
def test_parts_that_are_missing_or_disagree_are_named(tmp_path, part, tensor, message):
    codes, zeros, scales = random_module(np.random.default_rng(2), 4, 8, 1)
    tensors = {name: value for name, value in gemm(codes, zeros, scales).items() if name != f"m.{part}"}
    if tensor is not None:
        tensors[f"m.{part}"] = tensor
    with pytest.raises(YardstickError, match=message):
        AwqSource(write_checkpoint(tmp_path, PLAIN, tensors)).get("m.weight")


def test_a_truncated_file_is_refused(tmp_path):
    codes, zeros, scales = random_module(np.random.default_rng(2), 4, 8, 1)
    path = write_checkpoint(tmp_path, PLAIN, gemm(codes, zeros, scales)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(YardstickError, match="model.safetensors: truncated or not a safetensors file"):
        AwqSource(tmp_path)
