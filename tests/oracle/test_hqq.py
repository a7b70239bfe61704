"""hqq checkpoints against the package's own packing and dequantization, on CPU."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from hqq.core.bitpack import BitPack
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from hqq.models.hf.base import AutoHQQHFModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny_model
from yardstick.errors import YardstickError
from yardstick.models.config import load_config
from yardstick.models.prefill import expected_tensors
from yardstick.sources import audit_source, open_source
from yardstick.sources.hqq import PACKINGS, unpack_rows

LAYER = "model.layers.0.mlp.up_proj"
# rows that the package can pack: parts of equal size, except for 3 bits
PARTS = {8: 1, 4: 2, 3: 1, 2: 4, 1: 8}


def save_pickle(folder, states):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(states, folder / "qmodel.pt")
    return f"hqq:{folder}"


def save_tensors(folder, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return f"hqq:{folder}"


def linear(shape, bits, group, axis, encoded, seed=0, dtype=torch.bfloat16, **options):
    """A layer that the package quantized, and its state: with settings as tensors, or as plain values."""
    layer = torch.nn.Linear(shape[1], shape[0], bias=False)
    generator = torch.Generator().manual_seed(seed)
    layer.weight.data = torch.randn(shape, generator=generator) * torch.linspace(0.1, 2, shape[1]) + 0.07
    config = BaseQuantizeConfig(nbits=bits, group_size=None, axis=axis, **options)
    config["weight_quant_params"]["group_size"] = group
    quantized = HQQLinear(layer, config, compute_dtype=dtype, device="cpu")
    quantized.encoded_state_dict = encoded
    return quantized, {key: value for key, value in quantized.state_dict().items() if value is not None}


def in_fp32(quantized):
    """The package's own dequantization, made to calculate in fp32."""
    meta = dict(quantized.meta) | {"compute_dtype": torch.float32}
    meta |= {key: meta[key].float() for key in ("scale", "zero")}
    return Quantizer.dequantize(quantized.W_q.data, meta)


@settings(max_examples=25, deadline=None)
@given(bits=st.sampled_from(sorted(PARTS)), rows=st.integers(1, 23), columns=st.integers(1, 9), seed=st.integers(0, 9))
def test_codes_are_packed_as_the_package_packs_them(bits, rows, columns, seed):
    rows = rows * PARTS[bits]
    codes = torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(seed))
    packing = Quantizer.bit_to_packing[bits]
    words = Quantizer.pack[packing](codes)
    assert torch.equal(unpack_rows(words, *PACKINGS[packing][:2])[:rows], codes)


def test_the_first_half_of_the_rows_is_in_the_high_bits():
    assert unpack_rows(torch.tensor([[0x1F], [0x2E]], dtype=torch.uint8), 4, 2).flatten().tolist() == [1, 2, 15, 14]
    assert unpack_rows(BitPack.pack_3bit_32(torch.arange(8)[:, None]), 3, 10).flatten().tolist() == [*range(8), 0, 0]


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from(sorted(PARTS)),
    axis=st.sampled_from([0, 1]),
    out=st.integers(1, 5),
    groups=st.integers(1, 5),
    encoded=st.booleans(),
)
def test_weights_are_the_packages_own(tmp_path_factory, bits, axis, out, groups, encoded):
    """Groups of 24 that do not end with the rows of the matrix: 24 is no multiple of most widths here."""
    out *= PARTS[bits] if axis else 1
    shape, group = (8 * out, 3 * groups), 24
    quantized, state = linear(shape, bits, group, axis, encoded, seed=out)
    folder = tmp_path_factory.mktemp("hqq")
    if encoded:
        source = open_source(save_tensors(folder, {f"{LAYER}.{key}": value for key, value in state.items()}))
    else:
        source = open_source(save_pickle(folder, {LAYER: state}))
    assert torch.equal(source.get(f"{LAYER}.weight"), in_fp32(quantized))
    info = source.infos()[f"{LAYER}.weight"]
    assert info.shape == shape and info.scheme == f"hqq{bits}-g24" + ("" if axis else "-axis0")
    expected = sum(8 * value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    assert info.bits == expected
    assert info.bits >= quantized.W_q.nbytes * 8 + 2 * 16 * out * groups


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_other_widths_and_codes_under_a_float_type(tmp_path, bits, axis, encoded):
    shape, dtype = (20, 24), torch.float16
    quantized, state = linear(shape, bits, 20, axis, encoded, dtype=dtype, view_as_float=True)
    assert state["W_q"].dtype == torch.float16
    spec = (
        save_tensors(tmp_path, {f"{LAYER}.{key}": value for key, value in state.items()})
        if encoded
        else save_pickle(tmp_path, {LAYER: state})
    )
    assert torch.equal(open_source(spec).get(f"{LAYER}.weight"), in_fp32(quantized))


def test_one_group_per_row_and_a_bit_and_a_half(tmp_path):
    quantized, state = linear((12, 30), 1.58, None, 1, encoded=False)
    source = open_source(save_pickle(tmp_path / "a", {LAYER: state}))
    assert torch.equal(source.get(f"{LAYER}.weight"), in_fp32(quantized))
    assert source.infos()[f"{LAYER}.weight"].scheme == "hqq1.58-g30"
    _, state = linear((12, 30), 1.58, None, 1, encoded=True)
    source = open_source(save_tensors(tmp_path / "b", {f"{LAYER}.{key}": value for key, value in state.items()}))
    assert torch.equal(source.get(f"{LAYER}.weight"), in_fp32(quantized))


def test_older_files_keep_the_settings_in_a_dictionary_of_their_own(tmp_path):
    quantized, state = linear((12, 30), 4, 30, 1, encoded=False)
    nested = {"W_q": state.pop("W_q"), "meta": state}
    source = open_source(save_pickle(tmp_path, {LAYER: nested}))
    assert torch.equal(source.get(f"{LAYER}.weight"), in_fp32(quantized))


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_the_package(tmp_path, tied):
    """The whole path: quantize a model, save it its way, read it."""
    tiny = write_tiny_model(tmp_path / "model", "llama", tied=tied, layers=1)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    config = BaseQuantizeConfig(nbits=4, group_size=64)
    AutoHQQHFModel.quantize_model(model, config, compute_dtype=torch.bfloat16, device="cpu")
    AutoHQQHFModel.save_quantized(model, str(tmp_path / "saved"))
    source, original = open_source(f"hqq:{tmp_path / 'saved'}"), load_config(tiny)
    audit_source(source, expected_tensors(original, source))
    assert ("lm_head.weight" in source.infos()) != tied
    modules, quantized = dict(model.named_modules()), 0
    for name, info in source.infos().items():
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, HQQLinear):
            quantized += 1
            assert torch.equal(source.get(name), in_fp32(module))
            assert info.scheme == "hqq4-g64" and info.bits == info.numel * (4 + 32 / 64)
        else:
            assert torch.equal(source.get(name), module.weight.data) and info.scheme == "bf16"
    assert quantized == len(original.body_matrices())


def states(**changes):
    """State of a good layer of 12 x 30 weights with some entries changed; None takes one away."""
    _, state = linear((12, 30), 4, 30, 1, encoded=False)
    return {LAYER: {key: value for key, value in (state | changes).items() if value is not None}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "up_proj.scale is missing"),
        ({"zero": None}, "up_proj.zero is missing"),
        ({"scale": torch.ones(11, 1)}, r"up_proj.scale is F32 \[11, 1\], must be floats \[12, 1\]"),
        ({"zero": torch.ones(12, 1, dtype=torch.int32)}, r"up_proj.zero is I32 \[12, 1\], must be floats"),
        ({"zero": 7.0}, "up_proj.zero is missing"),
        ({"W_q": torch.ones(5, 30, dtype=torch.uint8)}, r"W_q is U8 \[5, 30\], which does not hold 12 x 30 codes"),
        ({"W_q": torch.ones(6, 30, dtype=torch.int32)}, "W_q has type I32, must be U8 for 4bit_u8"),
        ({"W_q": torch.ones(6, 15).half()}, "W_q has type F16, must be U8 for 4bit_u8"),
        ({"W_q": torch.ones(6, 13).half(), "view_as_float": True}, r"W_q is F16 \[6, 13\], which does not hold"),
        ({"shape": None}, r"W_q: shape must be \[out, in\]"),
        ({"shape": 7}, r"W_q: shape must be \[out, in\]"),
        ({"shape": torch.Size([0, 30])}, r"W_q: shape must be \[out, in\]"),
        ({"axis": 2}, "W_q: axis must be 0 or 1"),
        ({"nbits": 7}, "W_q: nbits 7 packed as '4bit_u8' is not a scheme of hqq"),
        ({"nbits": 7, "packing": None}, "W_q: nbits 7 packed as None is not a scheme of hqq"),
        ({"packing": "2bit_u8"}, "W_q: nbits 4 packed as '2bit_u8' is not a scheme of hqq"),
        ({"group_size": 0}, r"W_q: group_size must divide 12 x 30 weights \(got 0\)"),
        ({"group_size": -30}, r"W_q: group_size must divide 12 x 30 weights \(got -30\)"),
        ({"group_size": 2**60}, "W_q: group_size must divide 12 x 30 weights"),
        ({"group_size": 120}, r"W_q is U8 \[6, 30\], which does not hold 3 x 120 codes"),
        ({"quant_scale": True}, r"W_q: quantized zeros or scales \(quant_scale\) are not supported"),
        ({"zero_q": torch.ones(3)}, r"W_q: quantized zeros \(zero_q\) are not supported"),
        ({"meta_scale": {"nbits": 8}}, r"W_q: quantized scales \(meta_scale\) are not supported"),
        ({"zero_scale": torch.ones(2, 12, 1)}, r"W_q: zeros and scales in one tensor"),
        ({"scale": torch.ones(12, 1, dtype=torch.complex64)}, "up_proj.scale has type torch.complex64"),
    ],
)
def test_damage_is_one_error_that_names_the_tensor(tmp_path, changes, message):
    with pytest.raises(YardstickError, match=message):
        open_source(save_pickle(tmp_path, states(**changes)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shape", torch.ones(500, 500), r"up_proj.shape has shape \[500, 500\]: not a setting"),
        ("packing", torch.tensor([300, 1, 2]), "packed as '.*' is not a scheme of hqq"),
        ("nbits", torch.tensor(float("nan")), "nbits nan packed as '4bit_u8' is not a scheme"),
        ("axis", torch.tensor([], dtype=torch.int32), "axis must be 0 or 1"),
        ("shape", torch.tensor([12.0, 30.0]), r"shape must be \[out, in\]"),
    ],
)
def test_settings_kept_as_tensors_may_be_damaged_too(tmp_path, field, value, message):
    _, state = linear((12, 30), 4, 30, 1, encoded=True)
    with pytest.raises(YardstickError, match=message):
        open_source(save_tensors(tmp_path, {f"{LAYER}.{key}": v for key, v in (state | {field: value}).items()}))


class Intruder:
    """Unpickling this would write a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_a_pickle_that_runs_code_is_refused_unrun(tmp_path):
    target = tmp_path / "made"
    with pytest.raises(YardstickError, match="qmodel.pt: torch's restricted loader does not load it") as caught:
        open_source(save_pickle(tmp_path, {LAYER: {"W_q": Intruder(target)}}))
    assert not target.exists() and "\n" not in str(caught.value)
    (tmp_path / "qmodel.pt").write_bytes(pickle.dumps(Intruder(target)))
    with pytest.raises(YardstickError, match="qmodel.pt: torch's restricted loader does not load it"):
        open_source(f"hqq:{tmp_path}")
    assert not target.exists()


def test_truncated_damaged_and_other_pickles(tmp_path):
    spec = save_pickle(tmp_path, states())
    path = tmp_path / "qmodel.pt"
    data = path.read_bytes()
    for cut in (data[: len(data) // 2], data[:-10], b"", b"abc", bytes(1000)):
        path.write_bytes(cut)
        with pytest.raises(YardstickError, match="qmodel.pt: torch's restricted loader does not load it"):
            open_source(spec)
    with pytest.raises(YardstickError, match="holds a list, not the states of modules"):
        open_source(save_pickle(tmp_path, [1, 2]))
    with pytest.raises(YardstickError, match="module a.weight is not a state of tensors"):
        open_source(save_pickle(tmp_path, {"a.weight": torch.ones(3)}))


@settings(max_examples=60, deadline=None)
@given(position=st.floats(0, 1), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_of_ours_or_other_values(tmp_path_factory, position, value):
    folder = tmp_path_factory.mktemp("hqq")
    spec = save_pickle(folder, states())
    data = bytearray((folder / "qmodel.pt").read_bytes())
    data[int(position * (len(data) - 1))] = value
    (folder / "qmodel.pt").write_bytes(data)
    try:
        source = open_source(spec)
        for name in source.infos():
            source.get(name)
    except YardstickError:
        pass


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(YardstickError, match="holds no model.safetensors"):
        open_source(f"hqq:{tmp_path}")
