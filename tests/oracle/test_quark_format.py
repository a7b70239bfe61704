"""AMD Quark checkpoints written by hand, in both orders of a word and under true and false labels."""

import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.oracle.test_awq_format import interleave
from tests.oracle.test_gptq_format import expected, write_checkpoint
from tests.unit.test_unpack_bits import pack
from yardstick.errors import YardstickError
from yardstick.sources import open_source
from yardstick.sources.hf import HuggingFaceSource
from yardstick.sources.quark import QuarkSource, likelier_pack_method

WEIGHT = {"dtype": "uint4", "qscheme": "per_group", "ch_axis": -1, "group_size": 4, "symmetric": False}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "ch_axis": None, "group_size": None, "symmetric": True}


def config(weight=WEIGHT, pack_method="reorder", **changes):
    export = {"pack_method": pack_method, "weight_format": "real_quantized", "kv_cache_group": []}
    scheme = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": scheme, "export": export, "exclude": []} | changes


def words_of(codes, order):
    """int32 words along the outputs; an int4 code is its two's complement."""
    codes = np.asarray(codes) % 16
    return interleave(codes) if order == "reorder" else pack(codes, 4, axis=1)


def grouped(codes, zeros, scales, order, name="m") -> dict[str, torch.Tensor]:
    """Tensors of one module: codes [in, out], zero points and scales [groups, out]."""
    return {
        f"{name}.weight": words_of(codes, order),
        f"{name}.weight_zero_point": words_of(zeros, order),
        f"{name}.weight_scale": torch.tensor(np.asarray(scales), dtype=torch.float32),
    }


def quantized_original(rng, rows=32, out=20, size=8):
    """A bf16 matrix [out, in] with its uint4 codes, zero points and scales, from minimum to maximum."""
    original = torch.tensor(rng.normal(size=(out, rows)) + 0.3, dtype=torch.bfloat16)
    groups = original.float().numpy().T.reshape(rows // size, size, out)
    low, high = groups.min(axis=1), groups.max(axis=1)
    scales = np.float16((high - low) / 15)
    zeros = np.clip(np.round(-low / scales), 0, 15).astype(int)
    codes = np.clip(np.round(groups / scales[:, None]) + zeros[:, None], 0, 15).astype(int).reshape(rows, out)
    return original, codes, zeros, scales


def original_source(folder, original):
    folder.mkdir()
    save_file({"m.weight": original}, folder / "model.safetensors")
    return HuggingFaceSource(folder)


@pytest.mark.parametrize(("order", "word"), [("reorder", 0x75316420), ("order", 0x76543210)])
def test_b6_the_label_says_how_a_word_is_read(tmp_path, order, word):
    codes, zeros = [range(8)] * 4, [[3, 1, 4, 1, 5, 9, 2, 6]]
    scales = [[0.5, 1, 2, 4, 8, 16, 32, 64]]
    tensors = grouped(codes, zeros, scales, order)
    assert tensors["m.weight"].tolist()[0] == [word]
    source = QuarkSource(write_checkpoint(tmp_path, config(pack_method=order), tensors))
    assert source.get("m.weight")[:, 0].tolist() == [-1.5, 0, -4, 8, -8, -64, 128, 64]
    assert source.infos()["m.weight"].scheme == "quark-uint4-g4"
    assert source.infos()["m.weight"].bits == 4 * 32 + 32 + 8 * 32


@pytest.mark.parametrize("label", ["reorder", "order", None])
@pytest.mark.parametrize("order", ["reorder", "order"])
def test_b6_with_the_original_a_false_label_does_no_harm(tmp_path, order, label):
    original, codes, zeros, scales = quantized_original(np.random.default_rng(4))
    base = original_source(tmp_path / "base", original)
    (tmp_path / "quark").mkdir()
    tensors, scheme = grouped(codes, zeros, scales, order), WEIGHT | {"group_size": 8}
    folder = write_checkpoint(tmp_path / "quark", config(scheme, label), tensors)
    right = expected(codes, zeros, scales, [i // 8 for i in range(32)])
    assert torch.equal(open_source(f"quark:{folder}", base=base).get("m.weight"), right)
    if label is None:
        with pytest.raises(YardstickError, match="tensor m.weight: pack_method None is not supported"):
            QuarkSource(folder)
    else:
        assert torch.equal(QuarkSource(folder).get("m.weight"), right) == (label == order)


def test_b6_an_unrelated_original_stops(tmp_path):
    rng = np.random.default_rng(4)
    original, codes, zeros, scales = quantized_original(rng)
    tensors = grouped(codes, zeros, scales, "order")
    parts = [tensors[f"m.{part}"] for part in ("weight", "weight_scale", "weight_zero_point")]
    assert likelier_pack_method(*parts, original) == "order"
    # AWQ moves factors of input columns into the norm before: the weights are then far off, but not in their order
    smoothed = original * torch.tensor(10 ** rng.uniform(-1, 1, (1, 32)))
    assert float((smoothed - original).norm() / original.norm()) > 1.2
    assert likelier_pack_method(*parts, smoothed) == "order"
    with pytest.raises(YardstickError, match=r"by no pack_method .* \(mean cosine of columns -?0\.[01]\d as reorder, "):
        likelier_pack_method(*parts, torch.tensor(rng.normal(size=(20, 32))))
    with pytest.raises(YardstickError, match="31 inputs do not make 4 equal groups"):
        likelier_pack_method(parts[0][:31], *parts[1:], original[:, :31])
    (tmp_path / "quark").mkdir()
    folder = write_checkpoint(tmp_path / "quark", config(WEIGHT | {"group_size": 8}), tensors)
    other = original_source(tmp_path / "other", torch.randn(20, 32))
    with pytest.raises(YardstickError, match="tensor m.weight: by no pack_method does it resemble the original"):
        QuarkSource(folder, base=other).get("m.weight")
    short = original_source(tmp_path / "short", torch.randn(20, 31))
    with pytest.raises(YardstickError, match="tensor m.weight has another shape in .*short"):
        QuarkSource(folder, base=short).get("m.weight")


def test_int4_is_twos_complement_and_may_go_without_zero_points(tmp_path):
    """The file-to-file path: codes in order, scales out by groups, no zero points."""
    codes = np.array([[-8, -1, 0, 7, 1, 2, 3, 4], [5, -7, -3, -2, 6, -6, -4, -5]])
    scales = np.array([[0.5, 1, 2, 4, 8, 16, 32, 64]])
    zeros = np.zeros((1, 8), dtype=int)
    scheme = WEIGHT | {"dtype": "int4", "symmetric": True}
    right = expected(codes, zeros, scales, [0, 0])
    tensors = grouped(codes, zeros, scales, "order")
    assert tensors["m.weight"].tolist()[0] == [0x432170F8]
    folder = write_checkpoint(tmp_path, config(scheme, "order"), tensors)
    assert torch.equal(QuarkSource(folder).get("m.weight"), right)
    assert QuarkSource(folder).infos()["m.weight"].scheme == "quark-int4-g4"
    del tensors["m.weight_zero_point"]
    for scale in (tensors["m.weight_scale"], tensors["m.weight_scale"].T):
        folder = write_checkpoint(tmp_path, config(scheme, "order"), tensors | {"m.weight_scale": scale})
        assert torch.equal(QuarkSource(folder).get("m.weight"), right)
        assert QuarkSource(folder).infos()["m.weight"].bits == 2 * 32 + 8 * 32
    for change in ({"symmetric": False}, {"dtype": "uint4"}):
        with pytest.raises(YardstickError, match="tensor m.weight_zero_point is missing"):
            QuarkSource(write_checkpoint(tmp_path, config(scheme | change, "order"), tensors))


def test_signed_zero_points_and_which_side_of_a_square_is_the_groups(tmp_path):
    rng = np.random.default_rng(9)
    codes, zeros = rng.integers(-8, 8, (9, 3)), rng.integers(-8, 8, (3, 3))
    scales = np.float16(rng.uniform(0.1, 2, (3, 3)))
    scheme = WEIGHT | {"dtype": "int4", "symmetric": True, "group_size": 3}
    tensors = grouped(codes, zeros, scales, "reorder")
    source = QuarkSource(write_checkpoint(tmp_path, config(scheme), tensors))
    assert torch.equal(source.get("m.weight"), expected(codes, zeros, scales, [i // 3 for i in range(9)]))
    del tensors["m.weight_zero_point"]
    with pytest.raises(
        YardstickError, match=r"m.weight_scale has shape \[3, 3\]: .* cannot be told without zero points"
    ):
        QuarkSource(write_checkpoint(tmp_path, config(scheme), tensors))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 37),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from(["reorder", "order"]),
    st.sampled_from(["int4", "uint4"]),
    st.integers(0, 2**32 - 1),
)
def test_any_size_decodes_as_written(rows, out, size, order, dtype, seed):
    rng, low = np.random.default_rng(seed), -8 if dtype == "int4" else 0
    groups = -(-rows // size)
    codes, zeros = rng.integers(low, low + 16, (rows, out)), rng.integers(low, low + 16, (groups, out))
    scales = np.float16(rng.uniform(0.01, 3, (groups, out)))
    tensors = grouped(codes, zeros, scales, order)
    with tempfile.TemporaryDirectory() as folder:
        scheme = WEIGHT | {"dtype": dtype, "group_size": size}
        source = QuarkSource(write_checkpoint(folder, config(scheme, order), tensors))
        assert source.infos()["m.weight"].shape == (out, rows)
        assert source.infos()["m.weight"].bits == sum(8 * part.nbytes for part in tensors.values())
        assert torch.equal(source.get("m.weight"), expected(codes, zeros, scales, [i // size for i in range(rows)]))


def test_fp8_by_tensor_and_by_row(tmp_path):
    """E4M3 bytes worked out on paper: 0x38 is 1, 0xC5 is -3.25, 0x7E is 448, 0x01 is 2^-9."""
    stored = torch.tensor([[0x38, 0xC5], [0x7E, 0x01]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"m.weight": stored, "m.weight_scale": torch.tensor(0.5), "m.input_scale": torch.tensor(3.0)}
    tensors["n.weight"] = torch.randn(2, 2).bfloat16()
    source = QuarkSource(write_checkpoint(tmp_path, config(FP8), tensors))
    assert source.get("m.weight").tolist() == [[0.5, -1.625], [224, 2**-10]]
    assert source.infos()["m.weight"].scheme == "quark-fp8-tensor" and source.infos()["m.weight"].bits == 32 + 32
    assert source.infos()["n.weight"].scheme == "bf16"
    assert source.ignored() == {"m.input_scale": "scale of activations, not used"}
    tensors["m.weight_scale"] = torch.tensor([0.5, 2.0])
    by_row = FP8 | {"qscheme": "per_channel", "ch_axis": 0}
    source = QuarkSource(write_checkpoint(tmp_path, config(by_row), tensors))
    assert source.get("m.weight").tolist() == [[0.5, -1.625], [896, 2**-8]]
    assert source.infos()["m.weight"].scheme == "quark-fp8-channel"
    with pytest.raises(YardstickError, match=r"tensor m.weight_scale has shape \[2\], which is not per_tensor"):
        QuarkSource(write_checkpoint(tmp_path, config(FP8), tensors))


def test_schemes_by_layer(tmp_path):
    rng = np.random.default_rng(1)
    codes, zeros = rng.integers(0, 16, (4, 8)), rng.integers(0, 16, (1, 8))
    scales = np.float16(rng.uniform(0.1, 2, (1, 8)))
    tensors = grouped(codes, zeros, scales, "reorder", "layers.0.q_proj")
    tensors |= grouped(codes, zeros, scales, "reorder", "layers.1.k_proj")
    tensors["lm_head.weight"] = torch.randn(2, 4).bfloat16()
    layers = {"*k_proj": {"weight": WEIGHT | {"dtype": "int4"}}, "*": {"weight": WEIGHT}}
    source = QuarkSource(write_checkpoint(tmp_path, config(layer_quant_config=layers, exclude=["lm_head"]), tensors))
    schemes = {name: info.scheme for name, info in source.infos().items()}
    assert schemes == {
        "layers.0.q_proj.weight": "quark-uint4-g4",
        "layers.1.k_proj.weight": "quark-int4-g4",
        "lm_head.weight": "bf16",
    }
    for pattern in ("layers.1.*", r"re:.*\.k_proj$", "layers.1.k_proj"):
        with pytest.raises(YardstickError, match="tensor layers.1.k_proj.weight is quantized, but exclude has"):
            QuarkSource(write_checkpoint(tmp_path, config(exclude=["lm_head", "q_proj", pattern]), tensors))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (config(quant_method="awq"), "config.json: quant_method awq is not quark"),
        (config(pack_method="linear"), "tensor m.weight: pack_method linear is not supported"),
        (config(export={"weight_format": "fake_quantized"}), "export.weight_format fake_quantized is not supported"),
        (config(export=["reorder"]), "config.json: export must be an object"),
        (config(layer_type_quant_config={"Linear": {}}), "layer_type_quant_config is not supported"),
        (config(WEIGHT | {"dtype": "fp4"}), "tensor m.weight: fp4 per_group on axis -1 is not supported"),
        (config(WEIGHT | {"qscheme": "per_channel"}), "tensor m.weight: uint4 per_channel on axis -1 is not supported"),
        (config(WEIGHT | {"ch_axis": 0}), "tensor m.weight: uint4 per_group on axis 0 is not supported"),
        (config([WEIGHT, FP8]), "tensor m.weight: a scheme of 2 stages is not supported"),
        (config(None), "tensor m.weight: a scheme of none is not supported"),
        (config(FP8 | {"scale_format": "e8m0"}), "tensor m.weight_scale: e8m0 is not supported"),
        (config(FP8), "tensor m.weight has type I32, not F8_E4M3"),
        (config(WEIGHT | {"group_size": None}), "tensor m.weight: group_size None is not a size"),
        (config(WEIGHT | {"group_size": 2}), r"m.weight_zero_point has shape \[1, 1\], .* of 2 asks for \[2, 1\]"),
        (config(exclude=["re:("]), r"config.json: pattern \( cannot be read"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, quantization, message):
    tensors = grouped([range(8)] * 4, [[3] * 8], [[0.5] * 8], "reorder")
    with pytest.raises(YardstickError, match=message):
        QuarkSource(write_checkpoint(tmp_path, quantization, tensors))


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("weight", None, "tensor m.weight is missing"),
        ("weight_scale", None, "tensor m.weight_scale is missing"),
        ("weight_zero_point", None, "tensor m.weight_zero_point is missing"),
        ("weight_scale", torch.ones(1, 9), r"m.weight_scale has shape \[1, 9\], .* 1 groups and 1 to 8 outputs"),
        ("weight_scale", torch.ones(1, 8).int(), "tensor m.weight_scale has type I32, not F16"),
        ("weight_zero_point", torch.ones(1, 8).int(), r"m.weight_zero_point has shape \[1, 8\], .* asks for \[1, 1\]"),
        ("weight", torch.ones(4, 1).byte(), "tensor m.weight has type U8, not I32"),
        ("weight_scale", torch.full((1, 8), float("nan")), "tensor m.weight is not finite"),
    ],
)
def test_parts_that_are_missing_or_disagree_are_named(tmp_path, part, tensor, message):
    tensors = grouped([range(8)] * 4, [[3] * 8], [[0.5] * 8], "reorder")
    tensors = {name: value for name, value in tensors.items() if name != f"m.{part}"}
    if tensor is not None:
        tensors[f"m.{part}"] = tensor
    with pytest.raises(YardstickError, match=message):
        QuarkSource(write_checkpoint(tmp_path, config(), tensors)).get("m.weight")


def test_a_truncated_file_is_refused(tmp_path):
    tensors = grouped([range(8)] * 4, [[3] * 8], [[0.5] * 8], "reorder")
    path = write_checkpoint(tmp_path, config(), tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(YardstickError, match="model.safetensors: truncated or not a safetensors file"):
        QuarkSource(tmp_path)
