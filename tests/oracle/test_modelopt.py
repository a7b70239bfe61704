"""ModelOpt NVFP4 and FP8 against a loop over the elements, from the stored bytes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.oracle.test_fp8 import e4m3, random_codes
from yardstick.errors import YardstickError
from yardstick.sources import audit_source, open_source
from yardstick.sources.modelopt import dequantize_nvfp4

LAYER, OTHER = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def save(folder, tensors, beside=False, **config):
    """A folder; `beside`: the settings lie in hf_quant_config.json, as all exports before 2025 have them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"quant_algo": "NVFP4"} | config
    if beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
        (folder / "config.json").write_text("{}")
    else:
        config = {"quantization_config": {"quant_method": "modelopt"} | config}
        (folder / "config.json").write_text(json.dumps(config))
    return f"modelopt:{folder}"


def nvfp4(out, groups, seed=0, name=LAYER, factor=0.0123):
    """Any codes, and any positive block scales: no two alike in most cases."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (out, 8 * groups), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 127, (out, groups), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    return {
        f"{name}.weight": packed,
        f"{name}.weight_scale": scales,
        f"{name}.weight_scale_2": torch.tensor(factor),
    }


def fp8(shape, scale=0.0375, name=OTHER):
    return {f"{name}.weight": random_codes(shape), f"{name}.weight_scale": torch.tensor(scale)}


def by_hand(packed, scales, factor):
    """Element by element in fp32: the low nibble first, sixteen elements to a scale."""
    packed, scales, factor = packed.numpy(), scales.view(torch.uint8).numpy(), np.float32(float(factor))
    values = np.zeros((packed.shape[0], 2 * packed.shape[1]), np.float32)
    for r in range(values.shape[0]):
        for c in range(values.shape[1]):
            code = packed[r, c // 2] >> 4 if c % 2 else packed[r, c // 2] & 15
            sign = -1 if code & 8 else 1
            values[r, c] = np.float32(sign * E2M1[code & 7]) * (np.float32(e4m3(int(scales[r, c // 16]))) * factor)
    return torch.from_numpy(values)


@settings(max_examples=20, deadline=None)
@given(
    out=st.integers(1, 9),
    groups=st.integers(1, 5),
    seed=st.integers(0, 99),
    factor=st.floats(2.0**-20, 1024.0, width=32),
    beside=st.booleans(),
)
def test_nvfp4_is_the_bytes_read_by_hand(tmp_path_factory, out, groups, seed, factor, beside):
    tensors = nvfp4(out, groups, seed, factor=factor)
    source = open_source(save(tmp_path_factory.mktemp("modelopt"), tensors, beside))
    name = f"{LAYER}.weight"
    assert torch.equal(source.get(name), by_hand(*tensors.values()))
    info = source.infos()[name]
    assert info.shape == (out, 16 * groups) and info.scheme == "nvfp4"
    assert info.bits == out * groups * (16 * 4 + 8) + 32


def test_many_rows_are_decoded_in_parts():
    tensors = nvfp4(9000, 1)
    packed, scales, factor = tensors.values()
    values = dequantize_nvfp4(packed, scales, factor)
    for rows in (slice(4090, 4100), slice(8190, 9000)):
        assert torch.equal(values[rows], dequantize_nvfp4(packed[rows], scales[rows], factor))
    assert torch.equal(values[4095:4097], by_hand(packed[4095:4097], scales[4095:4097], factor))


def test_fault_b10_the_tensor_scale_multiplies(tmp_path):
    """Code 5 is 3.0; block scale 448, and the multiplier that goes with a divisor of 3584."""
    tensors = {
        f"{LAYER}.weight": torch.tensor([[0x05, 0xD0, 0, 0, 0, 0, 0, 0x20]], dtype=torch.uint8),
        f"{LAYER}.weight_scale": torch.tensor([[448.0]]).to(torch.float8_e4m3fn),
        f"{LAYER}.weight_scale_2": torch.tensor([1 / 3584]),
    }
    values = open_source(save(tmp_path, tensors)).get(f"{LAYER}.weight")
    assert values[0].tolist() == [0.375, 0, 0, -0.375, *[0] * 11, 0.125]


def test_fp8_has_one_scale(tmp_path):
    tensors = fp8((5, 7))
    source = open_source(save(tmp_path, tensors, quant_algo="fp8"))
    expected = np.array(
        [[e4m3(int(b)) for b in row] for row in tensors[f"{OTHER}.weight"].view(torch.uint8)], np.float32
    )
    assert torch.equal(source.get(f"{OTHER}.weight"), torch.from_numpy(expected * np.float32(0.0375)))
    info = source.infos()[f"{OTHER}.weight"]
    assert info.scheme == "fp8" and info.bits == 8 * 35 + 32


def test_schemes_mixed_by_layer_and_what_the_forward_does_not_need(tmp_path):
    """By what the file holds: a layer that the config lists but that is stored plain is plain."""
    plain = {"model.layers.1.mlp.up_proj.weight": torch.randn(4, 8).bfloat16()}
    unused = {f"{OTHER}.input_scale": torch.tensor(0.5), "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)}
    unused |= {"model.layers.0.self_attn.v_proj.v_scale": torch.tensor(1.0)}
    draft = {"mtp.layers.0.weight": random_codes((4, 4)), "mtp.layers.0.weight_scale": torch.ones(4, 1)}
    layers = {LAYER: "W4A16_NVFP4", OTHER: "FP8", "model.layers.1.mlp.up_proj": "NVFP4", "mtp.layers.0": "FP8_PB_WO"}
    for beside in (True, False):
        source = open_source(
            save(
                tmp_path / str(beside),
                nvfp4(3, 2) | fp8((5, 7)) | plain | unused | draft,
                beside,
                quant_algo="MIXED_PRECISION",
                quantized_layers={name: {"quant_algo": algorithm} for name, algorithm in layers.items()},
                **{"exclude_modules" if beside else "ignore": ["lm_head", "mtp*", "model.layers.0.mlp.gate*"]},
            )
        )
        audit_source(source, {f"{LAYER}.weight": (3, 32), f"{OTHER}.weight": (5, 7), next(iter(plain)): (4, 8)})
        assert {name: source.infos()[name].scheme for name in (f"{LAYER}.weight", f"{OTHER}.weight", *plain)} == {
            f"{LAYER}.weight": "nvfp4",
            f"{OTHER}.weight": "fp8",
            next(iter(plain)): "bf16",
        }
        ignored = source.ignored()
        assert set(ignored) == {*unused, *draft} and all(ignored.values())


def without(part):
    return {name: tensor for name, tensor in nvfp4(3, 2).items() if name != f"{LAYER}.{part}"}


def changed(part, tensor):
    return nvfp4(3, 2) | {f"{LAYER}.{part}": tensor}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("weight"), "up_proj.weight is missing"),
        (without("weight_scale"), "up_proj.weight_scale is missing"),
        (without("weight_scale_2"), "up_proj.weight_scale_2 is missing"),
        (changed("weight_scale", torch.ones(3, 3).to(torch.float8_e4m3fn)), r"weight_scale has shape \[3, 3\], must"),
        (changed("weight_scale", torch.ones(2, 2).to(torch.float8_e4m3fn)), r"weight_scale has shape \[2, 2\], must"),
        (
            changed("weight_scale", torch.ones(3, 2, dtype=torch.uint8)),
            "up_proj.weight is U8 with a scale of U8: neither",
        ),
        (changed("weight_scale_2", torch.ones(3)), "weight_scale_2 must be one float"),
        (changed("weight_scale_2", torch.ones((), dtype=torch.int32)), "weight_scale_2 must be one float"),
        (changed("weight", torch.ones(3, 16, dtype=torch.int32)), "up_proj.weight is I32 with a scale of F8_E4M3"),
        (changed("weight", torch.ones(3, 32)), "up_proj.weight is F32 with a scale of F8_E4M3: neither"),
        (changed("weight", torch.ones(3, 9, dtype=torch.uint8)), r"must have one scale per 16 of \[3, 18\]"),
        (
            changed("weight", torch.ones(2, 3, 16, dtype=torch.uint8)),
            r"weight has shape \[2, 3, 16\], must be a matrix",
        ),
        (changed("pre_quant_scale", torch.ones(32)), "up_proj.pre_quant_scale: AWQ scales"),
        (fp8((4, 6), [1.0, 2.0, 3.0, 4.0]), r"q_proj.weight_scale is F32 \[4\]; FP8 has one float per tensor"),
        ({f"{OTHER}.weight": random_codes((4, 6))}, "q_proj.weight_scale is missing"),
    ],
)
def test_damage_is_one_error_that_names_the_tensor(tmp_path, tensors, message):
    with pytest.raises(YardstickError, match=message):
        open_source(save(tmp_path, tensors))


@pytest.mark.parametrize("algorithm", ["W4A8_AWQ", "FP8_PB_WO", "MXFP8", "NVFP4_AWQ", None])
def test_other_algorithms_are_refused_by_name(tmp_path, algorithm):
    with pytest.raises(YardstickError, match=f"quant_algo {str(algorithm).upper()} is not supported"):
        open_source(save(tmp_path, nvfp4(3, 2), quant_algo=algorithm))
    layers = {LAYER: {"quant_algo": algorithm or "INT8_SQ"}}
    with pytest.raises(YardstickError, match=f"up_proj.weight: quant_algo {algorithm or 'INT8_SQ'} is not supported"):
        open_source(save(tmp_path, nvfp4(3, 2), quant_algo="MIXED_PRECISION", quantized_layers=layers))


@pytest.mark.parametrize("pattern", [LAYER, "model.layers.0.mlp*", "*up_proj"])
def test_what_the_config_excludes_must_be_plain(tmp_path, pattern):
    with pytest.raises(YardstickError, match="up_proj.weight is stored quantized, but the config excludes"):
        open_source(save(tmp_path, nvfp4(3, 2), exclude_modules=[pattern]))


def test_a_pattern_is_the_whole_name(tmp_path):
    """ "up_proj" and "model.layers.0.mlp" are not names of this module: fault B20."""
    open_source(save(tmp_path, nvfp4(3, 2), exclude_modules=["up_proj", "model.layers.0.mlp", "model.layers.0.mlp.up"]))


def test_settings_that_are_not_there(tmp_path):
    with pytest.raises(YardstickError, match="quant_method is 'awq', must be 'modelopt'"):
        open_source(save(tmp_path, nvfp4(3, 2), quant_method="awq"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(YardstickError, match="hf_quant_config.json: no such file"):
        open_source(f"modelopt:{tmp_path}")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": [4]}')
    with pytest.raises(YardstickError, match="quantization must be an object"):
        open_source(f"modelopt:{tmp_path}")


def test_a_nan_among_the_scales_is_reported(tmp_path):
    tensors = nvfp4(3, 2)
    tensors[f"{LAYER}.weight_scale"].view(torch.uint8)[1, 1] = 0x7F
    source = open_source(save(tmp_path, tensors))
    with pytest.raises(YardstickError, match=r"up_proj.weight is not finite at \[1, 16\] \(nan\)"):
        source.get(f"{LAYER}.weight")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(YardstickError, match="truncated or not a safetensors file"):
        open_source(f"modelopt:{tmp_path}")
