"""Block-scaled FP8 against a loop over the blocks in numpy, and against transformers' own dequantization."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.tiny import write_tiny_model
from yardstick.errors import YardstickError
from yardstick.models.config import load_config
from yardstick.models.prefill import expected_tensors
from yardstick.sources import audit_source, open_source
from yardstick.sources.fp8 import dequantize_blocks

LAYER = "model.layers.0.mlp.up_proj"
WEIGHT, SCALE = f"{LAYER}.weight", f"{LAYER}.weight_scale_inv"


def save(folder, tensors, block=(128, 128), **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": block and list(block)} | config
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return f"fp8:{folder}"


def random_codes(shape, seed=0):
    """Any finite FP8, of either sign."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return torch.where(codes & 127 == 127, codes - 1, codes).view(torch.float8_e4m3fn)


def e4m3(byte):
    """Value of a byte: sign, four bits of exponent with bias 7, three of fraction."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def by_hand(codes, scales, block):
    """The format block by block, in numpy; FP8 from its bits."""
    table = np.array([e4m3(byte) for byte in range(256)], np.float32)
    values, scales = table[codes.view(torch.uint8).numpy()], scales.numpy()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            values[rows, columns] = values[rows, columns] * scales[i, j]
    return torch.from_numpy(values)


def random_scales(shape, block, seed=0):
    size = [math.ceil(n / b) for n, b in zip(shape, block, strict=True)]
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 0.01 + 1e-4


@settings(max_examples=25, deadline=None)
@given(
    out=st.integers(1, 40),
    columns=st.integers(1, 40),
    block=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    seed=st.integers(0, 9),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_blocks_are_those_of_a_loop(tmp_path_factory, out, columns, block, seed, kind):
    codes = random_codes((out, columns), seed)
    scales = random_scales((out, columns), block, seed).to(kind)
    source = open_source(save(tmp_path_factory.mktemp("fp8"), {WEIGHT: codes, SCALE: scales}, block))
    assert torch.equal(source.get(WEIGHT), by_hand(codes, scales.float(), block))
    info = source.infos()[WEIGHT]
    assert info.bits == 8 * out * columns + 8 * scales.nbytes
    one = scales.shape == (1, 1)
    assert info.scheme == f"fp8-b{block[0]}x{block[1]}" and (one or scales.numel() > 1)


def test_the_published_block_size_with_short_edges(tmp_path):
    shape = (300, 517)
    codes, scales = random_codes(shape), random_scales(shape, (128, 128)).bfloat16()
    assert scales.shape == (3, 5)
    source = open_source(save(tmp_path, {WEIGHT: codes, SCALE: scales}))
    assert torch.equal(source.get(WEIGHT), by_hand(codes, scales.float(), (128, 128)))
    assert source.infos()[WEIGHT].scheme == "fp8-b128x128"


@pytest.mark.parametrize("kind", ["fp32", "e8m0"])
def test_whole_blocks_are_transformers_own(kind):
    codes, scales = random_codes((24, 40)), random_scales((24, 40), (8, 8))
    if kind == "e8m0":
        stored = torch.randint(100, 140, scales.shape, dtype=torch.uint8)
        scales, theirs = torch.ldexp(torch.ones(stored.shape), stored.int() - 127), stored
    else:
        theirs = scales
    expected = Fp8Dequantize(None)._dequantize_one(codes, theirs, torch.float32)
    assert torch.equal(dequantize_blocks(codes, scales, (8, 8)), expected)


def test_a_checkpoint_that_transformers_reads_too(tmp_path):
    """The whole path: FP8 folder of a tiny model; transformers gives the same values, rounded to bf16."""
    tiny = write_tiny_model(tmp_path / "model", "llama", tied=False, layers=1)
    original, plain, tensors = load_config(tiny), open_source(f"hf:{tiny}"), {}
    for name in plain.infos():
        tensors[name] = plain.get(name)
        if name in original.body_matrices():
            blocks = tensors[name].float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
            scales = blocks.abs().amax((1, 3)) / 448
            tensors[name] = (blocks / scales[:, None, :, None]).reshape(tensors[name].shape).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scales
    spec = save(tmp_path / "fp8", tensors, (32, 32))
    raw = json.loads((tiny / "config.json").read_text())
    raw["quantization_config"] = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True).to_dict()
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(raw))
    source = open_source(spec)
    audit_source(source, expected_tensors(original, source))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    theirs = model.state_dict()
    for name in source.infos():
        assert torch.equal(source.get(name).bfloat16(), theirs[name])
    assert sum(info.scheme == "fp8-b32x32" for info in source.infos().values()) == len(original.body_matrices())


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("scale", [torch.tensor(0.37), torch.tensor([0.37])])
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_one_scale_per_tensor(tmp_path, name, scale, block):
    codes = random_codes((5, 7))
    source = open_source(save(tmp_path, {WEIGHT: codes, f"{LAYER}.{name}": scale}, block))
    assert torch.equal(source.get(WEIGHT), codes.float() * torch.tensor(0.37))
    assert source.infos()[WEIGHT].scheme == "fp8" and source.infos()[WEIGHT].bits == 8 * 35 + 32


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu])
def test_fault_b14_scales_that_are_exponents(tmp_path, kind):
    """Bytes 0, 127 and 130 are 2^-127, which is not 0, 1 and 8; as bytes and under their own type."""
    codes = torch.tensor([[1.5, -448.0], [3.0, 0.25], [-2.0, 1.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0], [127], [130]], dtype=torch.uint8).view(kind)
    source = open_source(save(tmp_path, {WEIGHT: codes, SCALE: scales}, (1, 2), scale_fmt="ue8m0"))
    assert source.get(WEIGHT).tolist() == [[1.5 * 2.0**-127, -448 * 2.0**-127], [3.0, 0.25], [-16.0, 8.0]]
    assert source.infos()[WEIGHT].scheme == "fp8-b1x2-e8m0" and source.infos()[WEIGHT].bits == 8 * 9


def test_fault_b14_byte_255_is_reported(tmp_path):
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)
    source = open_source(save(tmp_path, {WEIGHT: random_codes((3, 6)), SCALE: scales}, (3, 4)))
    with pytest.raises(YardstickError, match=r"up_proj.weight is not finite at \[0, 4\] \(nan\)"):
        source.get(WEIGHT)


def test_fault_b16_each_expert_has_blocks_of_its_own(tmp_path):
    """Two experts of 5 rows in blocks of 4: two rows of scales each, not three for ten rows."""
    name, codes = "model.layers.0.mlp.experts.up_proj", random_codes((2, 5, 6))
    scales = torch.tensor([[[1.0], [10.0]], [[100.0], [1000.0]]])
    source = open_source(save(tmp_path, {name: codes, f"{name}_scale_inv": scales}, (4, 8)))
    rows = torch.tensor([1.0] * 4 + [10.0] + [100.0] * 4 + [1000.0]).reshape(2, 5, 1)
    assert torch.equal(source.get(name), codes.float() * rows)
    flat = {name: codes, f"{name}_scale_inv": torch.ones(3, 1)}
    with pytest.raises(YardstickError, match=r"experts.up_proj_scale_inv has shape \[3, 1\], which does not fit"):
        open_source(save(tmp_path / "flat", flat, (4, 8)))


def test_fault_b17_the_stored_scale_is_the_one_that_counts(tmp_path):
    codes = torch.tensor([[448.0, 336.0]]).to(torch.float8_e4m3fn)
    source = open_source(save(tmp_path, {WEIGHT: codes, SCALE: torch.tensor([[127]], dtype=torch.uint8)}))
    assert source.get(WEIGHT)[0, 0] == 448.0  # not 336, whatever 0.75 the quantizer had in mind
    source = open_source(save(tmp_path / "b", {WEIGHT: codes, SCALE: torch.tensor([[0.75]])}))
    assert source.get(WEIGHT)[0, 0] == 336.0


def test_plain_tensors_stay_and_scales_of_activations_are_not_needed(tmp_path):
    tensors = {WEIGHT: random_codes((3, 6)), SCALE: torch.tensor([[2.0]]), f"{LAYER}.input_scale": torch.tensor(0.5)}
    tensors |= {"lm_head.weight": torch.randn(4, 6).bfloat16(), "mtp.fc.weight": random_codes((2, 2))}
    source = open_source(save(tmp_path, tensors, modules_to_not_convert=["lm_head", "model.layers.0.mlp"]))
    audit_source(source, {WEIGHT: (3, 6), "lm_head.weight": (4, 6)})
    assert torch.equal(source.get("lm_head.weight"), tensors["lm_head.weight"])
    assert source.infos()["lm_head.weight"].scheme == "bf16"
    assert "activations" in source.ignored()[f"{LAYER}.input_scale"]


GOOD = {WEIGHT: random_codes((9, 6)), SCALE: torch.tensor([[0.5], [0.25], [2.0]])}


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "block", "message"),
    [
        (without(SCALE), (4, 8), "up_proj.weight_scale_inv is missing"),
        (without(WEIGHT), (4, 8), "up_proj.weight is missing"),
        (GOOD | {WEIGHT: torch.ones(9, 6)}, (4, 8), "up_proj.weight has a scale and type F32; must be F8_E4M3"),
        (GOOD | {WEIGHT: torch.ones(9, 3).to(torch.int8)}, (4, 8), "up_proj.weight has a scale and type I8"),
        (
            GOOD | {WEIGHT: torch.ones(9, 6).to(torch.float8_e5m2)},
            (4, 8),
            "up_proj.weight has a scale and type F8_E5M2",
        ),
        (GOOD | {SCALE: torch.ones(3, 1).int()}, (4, 8), "weight_scale_inv has type I32, which is not a scale"),
        (
            GOOD | {SCALE: torch.ones(2, 1)},
            (4, 8),
            r"weight_scale_inv has shape \[2, 1\], which does not fit .*\[9, 6\]",
        ),
        (GOOD | {SCALE: torch.ones(1, 1)}, (4, 8), r"weight_scale_inv has shape \[1, 1\], which does not fit"),
        (GOOD | {WEIGHT: random_codes((54,))}, (4, 8), "up_proj.weight has shape .54., must be a matrix"),
        (GOOD, None, r"weight_scale_inv has shape \[3, 1\], which does not fit .* and no weight_block_size"),
        (GOOD, (2**50, 2**50), r"weight_scale_inv has shape \[3, 1\], which does not fit .* blocks of"),
        (GOOD, (0, 8), r"weight_block_size = \[0, 8\], must be two positive integers"),
        (GOOD, (4, -8), r"weight_block_size = \[4, -8\], must be two positive integers"),
        (GOOD, (4, 8, 2), "must be two positive integers"),
        (GOOD, (4.0, 8), "must be two positive integers"),
        (GOOD | {f"{LAYER}.weight_scale": torch.ones(1)}, (4, 8), "up_proj.weight has two scales"),
    ],
)
def test_damage_is_one_error_that_names_the_tensor(tmp_path, tensors, block, message):
    with pytest.raises(YardstickError, match=message):
        open_source(save(tmp_path, tensors, block))


def test_configs_that_say_something_else(tmp_path):
    with pytest.raises(
        YardstickError, match="up_proj.weight is stored in FP8, but the config's modules_to_not_convert"
    ):
        open_source(save(tmp_path, GOOD, (4, 8), modules_to_not_convert=[LAYER]))
    with pytest.raises(YardstickError, match="quant_method is 'fbgemm_fp8', must be 'fp8'"):
        open_source(save(tmp_path, GOOD, (4, 8), quant_method="fbgemm_fp8"))
    path = tmp_path / "model.safetensors"
    save(tmp_path, GOOD, (4, 8))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(YardstickError, match="truncated or not a safetensors file"):
        open_source(f"fp8:{tmp_path}")


def test_huge_blocks_are_one_block(tmp_path):
    codes = random_codes((9, 6))
    source = open_source(save(tmp_path, {WEIGHT: codes, SCALE: torch.tensor([[0.5]])}, (2**50, 2**50)))
    assert torch.equal(source.get(WEIGHT), codes.float() / 2)
