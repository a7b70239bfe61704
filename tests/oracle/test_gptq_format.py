"""GPTQ checkpoints written by hand, bit by bit, and decoded one weight at a time."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.unit.test_unpack_bits import pack
from yardstick.errors import YardstickError
from yardstick.sources import open_source
from yardstick.sources.gptq import GptqSource
from yardstick.sources.hf import HuggingFaceSource

PLAIN = {"quant_method": "gptq", "bits": 4, "group_size": 4, "sym": False, "desc_act": False}


def write_checkpoint(folder, quantization, tensors) -> Path:
    folder = Path(folder)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def module(codes, zeros, scales, bits=4, g_idx=None, minus=1, name="m"):
    """Tensors of one module: codes [in, out], zero points and scales [groups, out]; `minus` 1 is v1, 0 is v2."""
    tensors = {
        f"{name}.qweight": pack(np.asarray(codes), bits, axis=0),
        f"{name}.qzeros": pack((np.asarray(zeros) - minus) % (1 << bits), bits, axis=1),
        f"{name}.scales": torch.tensor(np.asarray(scales), dtype=torch.float16),
    }
    return tensors if g_idx is None else tensors | {f"{name}.g_idx": torch.tensor(g_idx, dtype=torch.int32)}


def expected(codes, zeros, scales, g_idx) -> torch.Tensor:
    """scale * (code - zero point), one weight at a time."""
    scales = np.asarray(scales, dtype=np.float16)
    codes, zeros = np.asarray(codes), np.asarray(zeros)
    weights = np.empty(codes.shape[::-1], dtype=np.float32)
    for i in range(codes.shape[0]):
        for o in range(codes.shape[1]):
            weights[o, i] = np.float32(scales[g_idx[i], o]) * np.float32(codes[i, o] - zeros[g_idx[i], o])
    return torch.from_numpy(weights)


def column(values, count):
    return np.repeat(np.asarray(values)[:, None], count, axis=1)


def test_b1_zero_points_are_those_of_the_format(tmp_path):
    tensors = module(column([0, 7, 8, 15], 8), np.full((1, 8), 8), np.full((1, 8), 0.5), g_idx=[0] * 4)
    v1 = write_checkpoint(tmp_path, PLAIN | {"sym": True, "checkpoint_format": "gptq"}, tensors)
    assert tensors["m.qzeros"].tolist() == [[0x77777777]]
    assert GptqSource(v1).get("m.weight")[3, :4].tolist() == [-4, -0.5, 0, 3.5]
    # asymmetric, nothing contradicts the field: seven is seven under v2, eight under v1 and without a field
    v2 = write_checkpoint(tmp_path, PLAIN | {"checkpoint_format": "gptq_v2"}, tensors)
    assert GptqSource(v2).get("m.weight")[3, :4].tolist() == [-3.5, 0, 0.5, 4]
    assert GptqSource(write_checkpoint(tmp_path, PLAIN, tensors)).get("m.weight")[3, :4].tolist() == [-4, -0.5, 0, 3.5]


@pytest.mark.parametrize(("bits", "half"), [(2, 2), (3, 4), (4, 8), (8, 128)])
@pytest.mark.parametrize(("field", "minus"), [("gptq", 0), ("gptq_v2", 1)])
def test_b1_a_symmetric_checkpoint_that_contradicts_its_field_stops(tmp_path, bits, half, field, minus):
    tensors = module(column([0, 1, 3, 2], 32), np.full((1, 32), half), np.full((1, 32), 0.5), bits, minus=minus)
    quantization = PLAIN | {"sym": True, "checkpoint_format": field, "bits": bits, "group_size": -1}
    source = GptqSource(write_checkpoint(tmp_path, quantization, tensors))
    stored = half - minus
    message = (
        f"tensor m.qzeros holds {stored}, which makes the zero points {stored + 1} if gptq, {stored} if gptq_v2; "
        f"checkpoint_format says {field} and sym asks for {half}"
    )
    with pytest.raises(YardstickError, match=message):
        source.get("m.weight")


@pytest.mark.parametrize(("field", "minus", "sign"), [("gptq", 0, "-"), ("gptq_v2", 1, r"\+"), (None, 0, "-")])
def test_b1_the_original_tells_of_asymmetric_zero_points(tmp_path, field, minus, sign):
    """300 outputs, so not all of them are looked at; factors of AWQ change nothing."""
    rng = np.random.default_rng(8)
    codes, zeros = rng.integers(0, 16, (32, 300)), rng.integers(4, 12, (4, 300))
    scales, g_idx = rng.uniform(0.5, 2, (4, 300)), (np.arange(32) // 8).tolist()
    weights = expected(codes, zeros, scales, g_idx)
    factors = torch.tensor(2.0 ** rng.uniform(-1, 1, (1, 32)))
    (tmp_path / "base").mkdir()
    original = (weights + torch.randn(300, 32) * 0.3) / factors
    save_file({"m.weight": original.bfloat16()}, tmp_path / "base" / "model.safetensors")
    base = HuggingFaceSource(tmp_path / "base")
    settings = PLAIN | {"group_size": 8} | ({"checkpoint_format": field} if field else {})
    (tmp_path / "gptq").mkdir()
    folder = write_checkpoint(tmp_path / "gptq", settings, module(codes, zeros, scales, minus=minus))
    message = (
        f"tensor m.qzeros: by format {field or 'gptq'} the weights lie {sign}(0.9|1.0). steps beside the original's"
    )
    with pytest.raises(YardstickError, match=message):
        open_source(f"gptq:{folder}", base=base).get("m.weight")
    right = write_checkpoint(tmp_path / "gptq", settings, module(codes, zeros, scales, minus=1 - minus))
    assert torch.equal(open_source(f"gptq:{right}", base=base).get("m.weight"), weights)


def test_b2_a_zero_point_of_zero_wraps(tmp_path):
    zeros, codes, scales = [[0, 3, 9, 1, 2, 0, 15, 5]], column([0, 5, 9, 15], 8), np.full((1, 8), 0.25)
    right = expected(codes, zeros, scales, [0] * 4)
    tensors = module(codes, zeros, scales, g_idx=[0] * 4)
    assert tensors["m.qzeros"].tolist()[0][0] & 0xFF == 0x2F  # the writer masked
    assert torch.equal(GptqSource(write_checkpoint(tmp_path, PLAIN, tensors)).get("m.weight"), right)
    assert right[0].tolist() == [0, 1.25, 2.25, 3.75] and right[1].tolist() == [-0.75, 0.5, 1.5, 3.0]


@pytest.mark.parametrize("quantizer", ["gptqmodel:5.6.0", ["optimum:1.24.0", "gptqmodel:2.0.0"]])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_b2_gptqmodel_borrows_across_fields(tmp_path, bits, quantizer):
    fields = 32 // bits
    zeros = np.arange(fields)[None] * 3 % (1 << bits)
    zeros[0, :2] = 0, 3  # the table's input: nibbles [15, 1] at four bits, for the borrow took one more from the second
    word = sum(int(zero) << bits * i for i, zero in enumerate(zeros[0]))
    word = (word - sum(1 << bits * i for i in range(fields))) % (1 << 32)
    codes, scales = column([1, 0, 3, 2], fields), np.linspace(0.5, 2, fields)[None]
    tensors = module(codes, zeros, scales, bits, g_idx=[0] * 4)
    tensors["m.qzeros"] = torch.tensor([[word - (1 << 32) if word >> 31 else word]], dtype=torch.int32)
    if bits == 4:
        assert word & 0xFF == 0x1F
    folder = write_checkpoint(tmp_path, PLAIN | {"bits": bits, "meta": {"quantizer": quantizer}}, tensors)
    assert torch.equal(GptqSource(folder).get("m.weight"), expected(codes, zeros, scales, [0] * 4))


def test_three_bits_of_older_gptqmodel(tmp_path):
    """Its words of ones were in the wrong order; a symmetric file still has 4 everywhere once they are added back."""
    quantization = PLAIN | {"bits": 3, "sym": True, "group_size": -1, "meta": {"quantizer": ["gptqmodel:4.2.5"]}}
    codes, zeros = np.random.default_rng(3).integers(0, 8, (32, 32)), np.full((1, 32), 4)
    scales = np.linspace(0.5, 2, 32)[None]
    tensors = module(codes, zeros, scales, 3)
    right = expected(codes, zeros, scales, [0] * 32)
    assert torch.equal(GptqSource(write_checkpoint(tmp_path, quantization, tensors)).get("m.weight"), right)
    v2 = pack(zeros, 3, axis=1).long()[0].tolist()
    old = [(word - ones) % (1 << 32) for word, ones in zip(v2, (0x24924924, 0x92492492, 0x49249249), strict=True)]
    signed = [word - (1 << 32) if word >> 31 else word for word in old]
    tensors["m.qzeros"] = torch.tensor([signed], dtype=torch.int32)
    assert torch.equal(GptqSource(write_checkpoint(tmp_path, quantization, tensors)).get("m.weight"), right)
    source = GptqSource(write_checkpoint(tmp_path, quantization | {"sym": False}, tensors))
    with pytest.raises(YardstickError, match="tensor m.qzeros: GPTQModel wrote asymmetric 3-bit zero points .* two"):
        source.get("m.weight")


def test_b3_g_idx_orders_scales_and_zero_points(tmp_path):
    quantization = PLAIN | {"desc_act": True, "group_size": 2}
    zeros = np.array([[3] * 8, [6] * 8])
    codes = zeros[[1, 0, 1, 0]] + 1
    tensors = module(codes, zeros, [[1.0] * 8, [10.0] * 8], g_idx=[1, 0, 1, 0])
    source = GptqSource(write_checkpoint(tmp_path, quantization, tensors))
    assert source.get("m.weight")[2].tolist() == [10, 1, 10, 1]
    assert source.infos()["m.weight"].scheme == "gptq-int4-g2-desc"
    bits = {"qweight": 8 * 32, "qzeros": 2 * 32, "scales": 16 * 16, "g_idx": 4 * 32}
    assert source.infos()["m.weight"].bits == sum(bits.values())


def test_an_act_order_that_was_dropped_is_not_guessed(tmp_path):
    tensors = module(column(range(8), 8), np.full((2, 8), 5), np.full((2, 8), 0.5))
    quantization = PLAIN | {"desc_act": True, "group_size": 4}
    with pytest.raises(YardstickError, match="tensor m.g_idx is missing, and desc_act needs it"):
        GptqSource(write_checkpoint(tmp_path, quantization, tensors))
    GptqSource(write_checkpoint(tmp_path, quantization | {"static_groups": True}, tensors)).get("m.weight")
    tensors["m.g_idx"] = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(YardstickError, match="tensor m.g_idx is 0 everywhere, and desc_act needs an order"):
        GptqSource(write_checkpoint(tmp_path, quantization, tensors)).get("m.weight")


def test_a_g_idx_that_was_never_set_means_the_order_of_the_columns(tmp_path):
    codes, zeros, scales = column([9, 1, 4, 7], 8), np.full((2, 8), 5), [[1.0] * 8, [8.0] * 8]
    tensors = module(codes, zeros, scales, g_idx=[0, 0, 0, 0])
    source = GptqSource(write_checkpoint(tmp_path, PLAIN | {"group_size": 2}, tensors))
    assert torch.equal(source.get("m.weight"), expected(codes, zeros, scales, [0, 0, 1, 1]))
    tensors["m.g_idx"] = torch.tensor([0, 1, 2, 0], dtype=torch.int32)
    with pytest.raises(YardstickError, match=r"tensor m.g_idx names groups outside 0\.\.1"):
        GptqSource(write_checkpoint(tmp_path, PLAIN | {"group_size": 2}, tensors)).get("m.weight")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_size_decodes_as_written(data):
    bits = data.draw(st.sampled_from([2, 3, 4, 8]))
    rows, out = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 37))
    size = data.draw(st.sampled_from([-1, 1, 3, 8, 32]))
    version, kind = (
        data.draw(st.sampled_from(["gptq", "gptq_v2"])),
        data.draw(st.sampled_from(["none", "plain", "any"])),
    )
    if kind == "none":
        rows = 32  # without g_idx only whole words tell how many inputs there are
    groups = 1 if size == -1 else -(-rows // size)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    codes, zeros = rng.integers(0, 1 << bits, (rows, out)), rng.integers(0, 1 << bits, (groups, out))
    scales = np.float16(rng.uniform(0.01, 3, (groups, out)))
    in_order = [i // (rows if size == -1 else size) for i in range(rows)]
    g_idx = rng.integers(0, groups, rows).tolist() if kind == "any" else in_order
    if kind == "any" and groups > 1:
        g_idx[-1] = 1  # all zero means never set
    tensors = module(codes, zeros, scales, bits, None if kind == "none" else g_idx, minus=version == "gptq")
    tensors["m.bias"] = torch.arange(float(out))
    quantization = PLAIN | {"bits": bits, "group_size": size, "checkpoint_format": version}
    with tempfile.TemporaryDirectory() as folder:
        source = GptqSource(write_checkpoint(folder, quantization, tensors))
        assert source.infos()["m.weight"].shape == (out, rows)
        assert source.infos()["m.weight"].scheme == f"gptq-int{bits}-" + ("channel" if size == -1 else f"g{size}")
        parts = [tensor for name, tensor in tensors.items() if name != "m.bias"]
        assert source.infos()["m.weight"].bits == sum(8 * part.nbytes for part in parts)
        assert torch.equal(source.get("m.weight"), expected(codes, zeros, scales, g_idx))
        assert torch.equal(source.get("m.bias"), tensors["m.bias"])


def test_more_outputs_than_are_decoded_at_a_time(tmp_path):
    rng = np.random.default_rng(5)
    codes, zeros = rng.integers(0, 16, (9, 601)), rng.integers(0, 16, (2, 601))
    scales = np.float16(rng.uniform(0.1, 3, (2, 601)))
    g_idx = [0, 1, 1, 0, 0, 1, 0, 1, 0]
    tensors = module(codes, zeros, scales, g_idx=g_idx)
    tensors["m.scales"] = tensors["m.scales"].bfloat16()
    found = GptqSource(write_checkpoint(tmp_path, PLAIN | {"group_size": 8}, tensors)).get("m.weight")
    assert torch.equal(found, expected(codes, zeros, tensors["m.scales"].float().numpy(), g_idx))


def test_rules_by_module(tmp_path):
    """The first matching pattern counts, from the start of the name; a module with a rule `-:` is not quantized."""
    eight = module(column([200, 3], 4), [[90] * 4], np.full((1, 4), 0.5), 8, g_idx=[0, 0], name="a.x_proj")
    four = module(column([2, 9], 8), [[7] * 8], np.full((1, 8), 0.5), 4, g_idx=[0, 0], name="a.y_proj")
    plain = {"a.z_proj.weight": torch.randn(4, 2).bfloat16()}
    rules = {
        r"-:.*\.z_proj": {},
        r"+:a\.x": {"bits": 8, "group_size": -1},
        r".*x_proj": {"bits": 2},
        "y_proj": {"bits": 3},
    }
    source = GptqSource(write_checkpoint(tmp_path, PLAIN | {"dynamic": rules}, eight | four | plain))
    schemes = {name: info.scheme for name, info in source.infos().items()}
    assert schemes == {
        "a.x_proj.weight": "gptq-int8-channel",
        "a.y_proj.weight": "gptq-int4-g4",
        "a.z_proj.weight": "bf16",
    }
    assert source.get("a.x_proj.weight")[1].tolist() == [55, -43.5]
    assert torch.equal(source.get("a.z_proj.weight"), plain["a.z_proj.weight"])
    with pytest.raises(YardstickError, match="a.y_proj.qweight is quantized, but dynamic rule -:a says it is not"):
        GptqSource(write_checkpoint(tmp_path, PLAIN | {"dynamic": {"-:a": {}}}, four))
    with pytest.raises(YardstickError, match=r"config.json: pattern \( cannot be read"):
        GptqSource(write_checkpoint(tmp_path, PLAIN | {"dynamic": {"(": {}}}, four))
    with pytest.raises(YardstickError, match="config.json: dynamic.a must be an object"):
        GptqSource(write_checkpoint(tmp_path, PLAIN | {"dynamic": {"a": [1]}}, four))
    with pytest.raises(
        YardstickError, match="a.y_proj.qzeros has 1 words for 8 codes, that is 2 or 3 or 4 bits; .* say 8"
    ):
        GptqSource(write_checkpoint(tmp_path, PLAIN | {"dynamic": {".*": {"bits": 8}}}, four))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "auto-round"}, "config.json: quant_method auto-round is not gptq"),
        ({"checkpoint_format": "marlin"}, "config.json: checkpoint_format marlin is not supported"),
        ({"checkpoint_format": "gptq", "is_marlin_format": True}, "checkpoint_format is both gptq and marlin"),
        ({"checkpoint_format": "bitblas"}, "checkpoint_format bitblas is not supported"),
        ({"checkpoint_format": "gptq_p"}, "checkpoint_format gptq_p is not supported"),
        ({"format": "exllama"}, "checkpoint_format exllama is not supported"),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, "checkpoint_format is both gptq and gptq_v2"),
        ({"adapter": {"rank": 8}}, "adapter .* is not supported"),
        ({"rotation": "hadamard"}, "rotation hadamard is not supported"),
        ({"bits": 5}, "tensor m.qweight: bits 5 in int32 words is not supported"),
        ({"bits": "4"}, "tensor m.qweight: bits '4' in int32 words is not supported"),
        ({"pack_dtype": "int16"}, "tensor m.qweight: bits 4 in int16 words is not supported"),
        ({"group_size": 0}, "tensor m.qweight: group_size 0 is not a size"),
        ({"group_size": 2}, "tensor m.scales has 1 groups, 4 inputs in groups of 2 make 2"),
        ({"bits": 8}, "tensor m.qzeros has 1 words for 8 codes, that is 2 or 3 or 4 bits; the settings say 8"),
        ({"meta": ["gptqmodel"]}, "config.json: meta must be an object"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, changes, message):
    tensors = module(column([0, 7, 8, 15], 8), [[3] * 8], np.full((1, 8), 0.5), g_idx=[0] * 4)
    with pytest.raises(YardstickError, match=message):
        GptqSource(write_checkpoint(tmp_path, PLAIN | changes, tensors)).get("m.weight")


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("qweight", None, "tensor m.qweight is missing"),
        ("qzeros", None, "tensor m.qzeros is missing"),
        ("scales", None, "tensor m.scales is missing"),
        ("scales", torch.ones(1, 7).half(), "tensor m.scales has 7 columns, m.qweight has 8"),
        ("scales", torch.ones(8).half(), r"tensor m.scales has shape \[8\], not 2 sizes"),
        ("scales", torch.ones(1, 8).int(), "tensor m.scales has type I32, not F16 or BF16 or F32"),
        ("qweight", torch.ones(2, 8).int(), "tensor m.qweight has 2 words for 4 codes, that is no supported number of"),
        ("qweight", torch.ones(1, 8).long(), "tensor m.qweight has type I64, not I32"),
        ("qzeros", torch.ones(2, 1).int(), "tensor m.qzeros has 2 groups, m.scales has 1"),
        (
            "qzeros",
            torch.ones(1, 2).int(),
            "tensor m.qzeros has 2 words for 8 codes, that is 8 bits; the settings say 4",
        ),
        ("g_idx", torch.zeros(20).int(), "tensor m.qweight has 1 words for 20 codes, that is no supported number of"),
        ("scales", torch.full((1, 8), float("inf")).half(), "tensor m.weight is not finite"),
    ],
)
def test_parts_that_are_missing_or_disagree_are_named(tmp_path, part, tensor, message):
    tensors = module(column([0, 7, 8, 15], 8), [[3] * 8], np.full((1, 8), 0.5), g_idx=[0] * 4)
    tensors = {name: value for name, value in tensors.items() if name != f"m.{part}"}
    if tensor is not None:
        tensors[f"m.{part}"] = tensor
    with pytest.raises(YardstickError, match=message):
        GptqSource(write_checkpoint(tmp_path, PLAIN, tensors)).get("m.weight")


def test_a_truncated_file_is_refused(tmp_path):
    tensors = module(column([0, 7, 8, 15], 8), [[3] * 8], np.full((1, 8), 0.5))
    path = write_checkpoint(tmp_path, PLAIN, tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(YardstickError, match="model.safetensors: truncated or not a safetensors file"):
        GptqSource(tmp_path)
