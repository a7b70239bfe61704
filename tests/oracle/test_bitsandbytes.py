"""bitsandbytes checkpoints against the package's own quantizers and dequantizers, on CPU."""

import json
import math

import bitsandbytes
import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.tiny import write_tiny_model
from yardstick.errors import YardstickError
from yardstick.models.config import load_config
from yardstick.models.prefill import expected_tensors
from yardstick.sources import audit_source, open_source
from yardstick.sources.bitsandbytes import dequantize_blocks

LAYER, HEADER = "model.layers.0.mlp.up_proj", {"quantization_config": {"quant_method": "bitsandbytes"}}
FLAGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4-bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(autouse=True)
def eager():
    """bitsandbytes compiles its fallback for odd widths; the same code runs in a second without."""
    with torch.compiler.set_stance("force_eager"):
        yield


def save(folder, tensors, config=HEADER):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return f"bnb:{folder}"


def quantize(shape, kind, block, nested, seed=0):
    """Stored tensors of one matrix as the package packs them, and the package's own state."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.1, 3, shape[1]) + 0.05
    packed, state = quantize_4bit(weight, blocksize=block, compress_statistics=nested, quant_type=kind)
    parts = {f"{LAYER}.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {f"{LAYER}.weight": packed} | parts, state


def their_values(packed, state):
    """What the package makes of them, in fp32, as one long row.

    Blocks run on from row to row, but version 0.50.2's AVX512 kernel starts anew in each row when the width is a
    multiple of 16 and not of the block: its values are then twice as far from the weight that was quantized.
    """
    shape = state.shape
    state.shape, state.dtype = (1, math.prod(shape)), torch.float32
    values = dequantize_4bit(packed, state).reshape(shape)
    state.shape = shape
    return values


def by_hand(tensors, kind):
    """The format element by element, from the stored bytes, in fp32."""
    get = {name.removeprefix(f"{LAYER}.weight").strip("."): value.numpy() for name, value in tensors.items()}
    state = json.loads(get[f"quant_state.bitsandbytes__{kind}"].tobytes())
    absmax = get["absmax"]
    if "nested_absmax" in get:
        offset, size = np.float32(state["nested_offset"]), state["nested_blocksize"]
        code, scale = get["nested_quant_map"], get["nested_absmax"]
        absmax = [np.float32(code[q] * scale[b // size]) + offset for b, q in enumerate(absmax)]
    packed, shape = get[""].reshape(-1), state["shape"]
    values = []
    for i in range(math.prod(shape)):
        code = packed[i // 2] & 15 if i % 2 else packed[i // 2] >> 4
        values.append(get["quant_map"][code] * np.float32(absmax[i // state["blocksize"]]))
    return torch.from_numpy(np.array(values, np.float32).reshape(shape))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 23),
    columns=st.integers(1, 75),
    kind=st.sampled_from(["nf4", "fp4"]),
    block=st.sampled_from([32, 64, 128]),
    nested=st.booleans(),
)
def test_four_bits_are_the_bytes_read_by_hand(tmp_path_factory, rows, columns, kind, block, nested):
    tensors, _ = quantize((rows, columns), kind, block, nested, seed=rows * 100 + columns)
    source = open_source(save(tmp_path_factory.mktemp("bnb"), tensors))
    assert torch.equal(source.get(f"{LAYER}.weight"), by_hand(tensors, kind))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((37, 50), 64), ((7, 93), 64), ((11, 126), 128), ((301, 66), 32), ((5, 1026), 4096), ((9, 160), 64)],
)
def test_four_bits_are_bitsandbytes_own_values(tmp_path, kind, nested, shape, block):
    """Bit for bit in fp32: both multiply a table value by an fp32 absmax once. 301 x 66 has 621 blocks of 32, so
    double quantization has three blocks of its own, the last one short; rows of 93 begin in the middle of a byte."""
    tensors, state = quantize(shape, kind, block, nested)
    source = open_source(save(tmp_path, tensors))
    values = source.get(f"{LAYER}.weight")
    assert values.dtype == torch.float32
    assert torch.equal(values, their_values(tensors[f"{LAYER}.weight"], state))
    info = source.infos()[f"{LAYER}.weight"]
    assert info.shape == shape and info.scheme == f"{kind}-g{block}" + ("-nested" if nested else "")
    assert info.bits == 8 * sum(tensor.nbytes for tensor in tensors.values())


def test_fault_b18_a_nested_absmax_has_an_offset():
    table, codes = torch.zeros(256), torch.tensor([7, 7], dtype=torch.uint8)
    table[7] = 0.5
    absmax = dequantize_blocks(codes, table, torch.tensor([0.02]), 256) + 0.02
    assert absmax.tolist() == pytest.approx([0.03, 0.03])


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 9))
def test_int8_is_bitsandbytes_own(tmp_path_factory, rows, columns, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).half() + 0.1
    codes, scales, _ = int8_vectorwise_quant(weight)
    tensors = {f"{LAYER}.weight": codes, f"{LAYER}.SCB": scales}
    tensors[f"{LAYER}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    source = open_source(save(tmp_path_factory.mktemp("bnb"), tensors))
    values = source.get(f"{LAYER}.weight")
    assert torch.equal(values, int8_vectorwise_dequant(codes, scales))
    assert torch.allclose(values, (codes.double() * scales[:, None].double() / 127).float(), rtol=2e-7)
    assert source.infos()[f"{LAYER}.weight"].bits == 8 * rows * columns + 32 * rows + 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("bnb") / "model", "llama", tied=False, layers=1)


@pytest.mark.parametrize("flags", FLAGS)
def test_a_checkpoint_of_transformers(tiny, tmp_path, flags):
    """The whole path: load quantized, save, read. Every tensor, bit for bit in fp32."""
    config = BitsAndBytesConfig(**FLAGS[flags])
    model = AutoModelForCausalLM.from_pretrained(tiny, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    source, original = open_source(f"bnb:{tmp_path / 'saved'}"), load_config(tiny)
    audit_source(source, expected_tensors(original, source))
    modules, originals, quantized = dict(model.named_modules()), open_source(f"hf:{tiny}"), 0
    for name in source.infos():
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            expected = their_values(module.weight.data, module.weight.quant_state)
            assert source.infos()[name].bits < 4.9 * expected.numel() + 12_000
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            expected = int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        else:
            expected = module.weight.data
            assert source.infos()[name].scheme == "bf16"
        quantized += expected.dtype == torch.float32
        values = source.get(name)
        assert torch.equal(values, expected)
        original_values = originals.get(name).float()
        error = (values.float() - original_values).square().mean() / original_values.square().mean()
        assert error < (0.03 if "4" in flags else 1e-3)  # a block out of place gives 0.05 and more
    assert quantized == len(original.body_matrices())


def damaged(change):
    tensors, _ = quantize((6, 70), "nf4", 64, nested=True)
    change({name.removeprefix(f"{LAYER}."): name for name in tensors}, tensors)
    return tensors


def drop(part):
    return lambda names, tensors: tensors.pop(names[part])


def replace(part, tensor):
    return lambda names, tensors: tensors.update({names[part]: tensor})


def state_with(**changes):
    def change(names, tensors):
        name = names["weight.quant_state.bitsandbytes__nf4"]
        state = json.loads(tensors[name].numpy().tobytes()) | changes
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("weight"), "up_proj.weight is missing"),
        (drop("weight.absmax"), "up_proj.weight.absmax is missing"),
        (drop("weight.quant_map"), "up_proj.weight.quant_map is missing"),
        (drop("weight.nested_absmax"), "up_proj.weight.nested_absmax is missing"),
        (drop("weight.nested_quant_map"), "up_proj.weight.nested_quant_map is missing"),
        (drop(STATE), "up_proj.weight.quant_state.bitsandbytes__nf4 is missing"),
        (
            replace(STATE, torch.tensor([123, 34, 98], dtype=torch.uint8)),
            "bitsandbytes__nf4 is damaged: not valid JSON",
        ),
        (replace(STATE, torch.tensor([255, 255], dtype=torch.uint8)), "bitsandbytes__nf4 is damaged: not valid JSON"),
        (replace(STATE, torch.full((50_000,), 91, dtype=torch.uint8)), "bitsandbytes__nf4 is damaged: not valid JSON"),
        (
            replace(STATE, torch.tensor([91, 93], dtype=torch.uint8)),
            "bitsandbytes__nf4 is damaged: not the state of nf4",
        ),
        (state_with(quant_type="fp4"), "bitsandbytes__nf4 is damaged: not the state of nf4"),
        (state_with(blocksize=0), "up_proj.weight: its state has blocksize = 0"),
        (state_with(blocksize=-64), "up_proj.weight: its state has blocksize = -64"),
        (state_with(blocksize=True), "up_proj.weight: its state has blocksize = True"),
        (state_with(blocksize=2**62), "up_proj.weight.absmax has 7 elements, shape and block size ask for 1"),
        (state_with(nested_blocksize=0), "up_proj.weight: its state has nested_blocksize = 0"),
        (state_with(nested_blocksize=3), "up_proj.weight.nested_absmax has 1 elements, shape and block size ask for 3"),
        (state_with(nested_offset=None), "up_proj.weight: its state holds no number nested_offset"),
        (state_with(shape=None), r"up_proj.weight: its state names no shape \[out, in\]"),
        (state_with(shape=[6, -70]), r"up_proj.weight: its state names no shape \[out, in\]"),
        (state_with(shape=[2**40, 2**40]), "up_proj.weight has 210 bytes, shape and block size ask for"),
        (state_with(shape=[70, 7]), "up_proj.weight has 210 bytes, shape and block size ask for 245"),
        (replace("weight.quant_map", torch.ones(15)), "up_proj.weight.quant_map has 15 elements"),
        (replace("weight.absmax", torch.ones(7, dtype=torch.int32)), "up_proj.weight.absmax has type I32"),
    ],
)
def test_damage_is_one_error_that_names_the_tensor(tmp_path, change, message):
    with pytest.raises(YardstickError, match=message):
        open_source(save(tmp_path, damaged(change)))


def test_what_is_not_known_is_refused(tmp_path):
    tensors, _ = quantize((6, 70), "nf4", 64, nested=False)
    tensors[f"{LAYER}.weight.quant_state.bitsandbytes__nf3"] = tensors.pop(f"{LAYER}.{STATE}")
    with pytest.raises(YardstickError, match="bitsandbytes__nf3 is not the one state of nf4 or fp4 weights"):
        open_source(save(tmp_path / "nf3", tensors))
    codes = {f"{LAYER}.weight": torch.ones(4, 6, dtype=torch.int8)}
    with pytest.raises(YardstickError, match="up_proj.SCB is missing"):
        open_source(save(tmp_path / "no-scale", codes))
    with pytest.raises(YardstickError, match="up_proj.SCB must be one float per row"):
        open_source(save(tmp_path / "short", codes | {f"{LAYER}.SCB": torch.ones(5)}))
    tiled = {f"{LAYER}.SCB": torch.ones(4), f"{LAYER}.weight_format": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(YardstickError, match=r"weight_format is 2 \(col_turing\); only 0 \(rows\)"):
        open_source(save(tmp_path / "tiled", codes | tiled))
    with pytest.raises(YardstickError, match="quant_method is 'gptq', must be 'bitsandbytes'"):
        open_source(save(tmp_path / "gptq", tensors, {"quantization_config": {"quant_method": "gptq"}}))


def test_truncated_and_not_finite(tmp_path):
    tensors, _ = quantize((6, 70), "nf4", 64, nested=True)
    tensors[f"{LAYER}.weight.nested_absmax"][0] = float("nan")
    source = open_source(save(tmp_path, tensors))
    with pytest.raises(YardstickError, match=r"up_proj.weight is not finite at \[0, 0\]"):
        source.get(f"{LAYER}.weight")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(YardstickError, match="truncated or not a safetensors file"):
        open_source(f"bnb:{tmp_path}")


def test_parts_that_the_forward_does_not_use_are_left_alone(tmp_path):
    """A head for multi-token prediction may be quantized in a way of its own; nothing of it is decoded."""
    tensors, _ = quantize((6, 70), "nf4", 64, nested=False)
    tensors["mtp.fc.weight"] = torch.ones(3, 5, dtype=torch.int8)
    source = open_source(save(tmp_path, tensors))
    assert "multi-token prediction" in source.ignored()["mtp.fc.weight"]
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()
    audit_source(source, {f"{LAYER}.weight": (6, 70)})
