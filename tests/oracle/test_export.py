"""Exported checkpoints in the hands of those they are for: compressed-tensors decodes them, transformers runs them."""

import json
from argparse import Namespace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.tiny import DELTA, write_tiny_model
from yardstick.cli import convert, export
from yardstick.errors import YardstickError
from yardstick.models.config import load_config
from yardstick.models.folder import open_folder
from yardstick.models.prefill import expected_tensors, final_hidden_states, head_rows
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.pack import dequantize
from yardstick.quantize.run_rtn import quantize_model
from yardstick.rivals.export_ct import integer_zeros, pack_words
from yardstick.sources import audit_source, open_source


@pytest.fixture(autouse=True)
def threads():
    """The command works on one."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def write_packed(folder, base, keep=None, group_size=32):
    """A round-to-nearest checkpoint of a model folder."""
    original, writer = open_folder(base), PackedWriter(folder, "digest")
    recipe = {"method": "rtn", "group_size": group_size, "mse": False, "keep_bf16": keep}
    writer.finish(quantize_model(original.source, original.config, recipe, writer, None), recipe, base)
    return folder


def run_export(packed, output, base=None):
    export.main(Namespace(folder=packed, output=output, base=base, record=None))
    return json.loads((output / "export.json").read_text())


def check_weights(packed, exported, config, record):
    """Weights of `ct:` against `packed:`: each matrix is off by what was reported, the rest is the same."""
    ours, theirs = open_source(f"packed:{packed}"), open_source(f"ct:{exported}")
    audit_source(theirs, expected_tensors(config, theirs))
    assert set(expected_tensors(config, theirs)) == set(expected_tensors(config, ours))
    reports, sums = {report["name"]: report for report in record["tensors"]}, [0.0, 0.0]
    for name in expected_tensors(config, ours):
        before, after = ours.get(name), theirs.get(name)
        if name not in reports:
            assert torch.equal(before, after) and before.dtype == after.dtype
            continue
        change, size = float((after - before).double().square().sum()), float(before.double().square().sum())
        sums = [sums[0] + change, sums[1] + size]
        assert reports[name]["relative_error"] == pytest.approx((change / size) ** 0.5, rel=1e-6)
    assert record["relative_error"] == pytest.approx((sums[0] / sums[1]) ** 0.5, rel=1e-6)
    return theirs


def our_logits(source, config, ids):
    return final_hidden_states(source, config, ids, torch.float32, 2) @ head_rows(source, config)[:].float().T


def check_logits(exported, source, config, load=AutoModelForCausalLM):
    ids = torch.randint(1, 500, (2, 24))
    model = load.from_pretrained(exported, dtype=torch.float32)
    for parameter in model.parameters():  # the text class of a wrapped model leaves plain ones in bf16 all the same
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    with torch.no_grad():
        theirs = model(ids).logits
    ours = our_logits(source, config, ids)
    assert float((theirs - ours).norm() / ours.norm()) <= 1e-4
    return model


@pytest.mark.parametrize(
    ("family", "tied", "keep", "changes"),
    [
        ("llama", True, None, {}),  # the head is untied
        ("llama", True, "lm_head|[qkv]_proj", {}),  # the head stays tied
        ("qwen2", False, "down_proj|lm_head", {}),
        ("qwen3_5", False, "lm_head", {"linear_value_head_dim": 16, "layers": 4}),
    ],
)
def test_transformers_runs_the_export(tmp_path, family, tied, keep, changes):
    base = write_tiny_model(tmp_path / "base", family, tied, **changes)
    packed = write_packed(tmp_path / "packed", base, keep)
    record, config = run_export(packed, tmp_path / "ct"), load_config(base)
    source = check_weights(packed, tmp_path / "ct", config, record)
    model = check_logits(tmp_path / "ct", source, config)
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == model.config.tie_word_embeddings == (tied and keep is not None)
    assert (tmp_path / "ct" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    ignored = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["ignore"]
    linears = {name.removesuffix(".weight") for name, shape in config.tensors().items() if len(shape) == 2} | {
        "lm_head"
    }
    quantized = {report["name"].removesuffix(".weight") for report in record["tensors"]}
    assert set(ignored) == linears - quantized - {"model.embed_tokens"}
    assert all(source.infos()[f"{name}.weight"].scheme.startswith("ct-int4-g32") for name in quantized)


def test_a_vision_checkpoint_is_whole_and_both_classes_run_it(tmp_path):
    text = DELTA | {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 3, "num_key_value_heads": 1, "initializer_range": 0.12}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 96}
    text |= {"tie_word_embeddings": False, "linear_value_head_dim": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    original = Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    original.save_pretrained(tmp_path / "base")
    packed = write_packed(tmp_path / "packed", tmp_path / "base")
    with pytest.raises(YardstickError, match="qwen3_5 has a vision tower, .* give --base, the original's folder"):
        run_export(packed, tmp_path / "ct")
    record, config = run_export(packed, tmp_path / "ct", tmp_path / "base"), load_config(tmp_path / "base")
    source = check_weights(packed, tmp_path / "ct", config, record)
    model = check_logits(tmp_path / "ct", source, config, Qwen3_5ForConditionalGeneration)
    check_logits(tmp_path / "ct", source, config)
    state = model.state_dict()
    vision = {name: value for name, value in original.state_dict().items() if "visual" in name}
    assert vision and all(torch.equal(state[name], value.float()) for name, value in vision.items())


def write_by_hand(folder, base, size_of, make=None):
    """Like write_packed, with a group size for each matrix, and a function that changes scales and minima."""
    original, writer = open_folder(base), PackedWriter(folder, "digest")
    generator = torch.Generator().manual_seed(3)
    for name, shape in expected_tensors(original.config, original.source).items():
        if not name.endswith("_proj.weight"):
            writer.add_plain(name, original.source.get(name))
            continue
        size = size_of(name)
        codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
        scales = (torch.rand(shape[0], -(-shape[1] // size), generator=generator) * 0.02 + 0.004).bfloat16()
        minima = (scales * -7.5 + torch.randn(scales.shape, generator=generator) * 0.02).bfloat16()
        writer.add_quantized(name, codes, *(make(scales, minima) if make else (scales, minima)), size)
    writer.finish_shard("rest")
    writer.finish(["rest"], {}, base)
    return folder


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("export") / "base", "qwen2", tied=False)


def test_several_group_sizes_and_rows_of_one_group(tmp_path, qwen2):
    """Whole rows are of the strategy channel: of exactly one group, and of a group that is wider than the row."""

    def size_of(name):
        return {"down_proj": 160, "o_proj": 200}.get(name.split(".")[-2], 48 if "self_attn" in name else 32)

    packed = write_by_hand(tmp_path / "packed", qwen2, size_of)
    record, config = run_export(packed, tmp_path / "ct"), load_config(qwen2)
    source = check_weights(packed, tmp_path / "ct", config, record)
    weights = [name for name in source.infos() if "layers.1" in name and name.endswith("_proj.weight")]
    schemes = {name.split(".")[-2]: source.infos()[name].scheme for name in weights}
    assert schemes["q_proj"] == "ct-int4-g48-asym" and schemes["gate_proj"] == "ct-int4-g32-asym"
    assert schemes["down_proj"] == schemes["o_proj"] == "ct-int4-channel-asym"
    check_logits(tmp_path / "ct", source, config)


def test_groups_of_one_value_and_clipped_zero_points_are_loaded_too(tmp_path, qwen2):
    def make(scales, minima):
        scales[0], minima[1] = 0, 0.125
        minima[0, 0] = 0
        return scales, minima

    packed = write_by_hand(tmp_path / "packed", qwen2, lambda name: 32, make)
    record, config = run_export(packed, tmp_path / "ct"), load_config(qwen2)
    assert all(report["constant_groups"] == report["groups"] // before for report, before in rows_of(record, config))
    assert all(report["clipped_groups"] > 0 for report in record["tensors"])
    source = check_weights(packed, tmp_path / "ct", config, record)
    ours = open_source(f"packed:{packed}")
    for report in record["tensors"]:  # groups of one value lose nothing
        assert torch.equal(source.get(report["name"])[0], ours.get(report["name"])[0])
    check_logits(tmp_path / "ct", source, config)


def rows_of(record, config):
    return [(report, config.tensors()[report["name"]][0]) for report in record["tensors"]]


def test_a_symmetric_checkpoint_survives_conversion_and_export(tmp_path, qwen2):
    """compressed-tensors to our packing and back: integer zero points lose nothing that was integer before."""
    packed = write_by_hand(tmp_path / "packed", qwen2, lambda name: 32, lambda scales, _: (scales, scales * -8))
    first = run_export(packed, tmp_path / "first")
    assert first["relative_error"] == 0
    settings = {"base": qwen2, "output": tmp_path / "again", "exact": True, "record": None}
    convert.main(Namespace(spec=f"ct:{tmp_path / 'first'}", **settings))
    assert run_export(tmp_path / "again", tmp_path / "second")["relative_error"] == 0
    for path in (tmp_path / "first").glob("*.safetensors"):
        stored = load_file(path)
        for name, tensor in stored.items():
            second = next(f for f in (tmp_path / "second").glob("*.safetensors") if name in load_file(f))
            assert torch.equal(load_file(second)[name], tensor), name


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(0, 2**31))
def test_words_are_those_of_the_library(rows, columns, seed):
    codes = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    words, signed = pack_words(codes), codes.to(torch.int8) - 8
    assert torch.equal(words, pack_to_int32(signed, 4))
    assert torch.equal(unpack_from_int32(words, 4, codes.shape), signed)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
def test_weights_are_the_nearest_ones_and_the_library_decodes_them(rows, groups, fp32, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 8 * groups), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) + 0.1).bfloat16()
    minima = (torch.randn(rows, groups, generator=generator) * 12 - 4).bfloat16()
    scales[torch.rand(rows, groups, generator=generator) < 0.2] = 0
    moved, scale, zeros, clipped, constant = integer_zeros(codes, scales, minima, 8)
    wide = scale.float().repeat_interleave(8, 1)
    ours = (moved.float() - zeros.float().repeat_interleave(8, 1)) * wide
    wanted = dequantize(codes, scales, minima, 8)
    one_value = (scales == 0).repeat_interleave(8, 1)
    assert torch.equal(ours[one_value], wanted[one_value]) and constant == int((scales == 0).sum())
    exact = -minima.float() / scales.float()
    assert clipped == int(((exact.round() < 0) | (exact.round() > 15))[scales != 0].sum())
    levels = torch.arange(16).float() - zeros.float().repeat_interleave(8, 1)[..., None]
    nearest = ((levels * wide[..., None]) - wanted[..., None]).abs().amin(-1)
    assert bool(((ours - wanted).abs() <= nearest + 1e-5 * wanted.abs() + 1e-6).all())
    state = {
        "weight_packed": pack_words(moved),
        "weight_scale": scale.float() if fp32 else scale,
        "weight_zero_point": pack_words(zeros.T.contiguous()).T.contiguous(),
        "weight_shape": torch.tensor(moved.shape),
    }
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=8, symmetric=False)
    library = BaseCompressor.get_value_from_registry("pack-quantized")
    decoded = library.decompress(state, QuantizationScheme(targets=["Linear"], weights=args))["weight"]
    assert torch.equal(decoded, ours.to(decoded.dtype))


def test_zero_points_and_codes_by_hand():
    """Scale 2: a minimum of -5 is a zero point of 2 (half to even); 6 and -40 lie outside of 0..15."""
    codes = torch.tensor([[0, 15, 7, 3, 12, 0, 5, 9, 0, 0]], dtype=torch.uint8)
    scales = torch.tensor([[2.0, 2.0, 2.0, 0.0, 0.0]]).bfloat16()
    minima = torch.tensor([[-5.0, 6.0, -40.0, -0.375, 0.375]]).bfloat16()
    moved, scale, zeros, clipped, constant = integer_zeros(codes, scales, minima, 2)
    assert zeros.tolist() == [[2, 0, 15, 1, 0]] and (clipped, constant) == (2, 2)
    # wanted 7 * 2 + 6 = 20 and 12; 12 * 2 - 40 = -16 and -40; 5 * 0 - 0.375; 0.375
    assert moved.tolist() == [[0, 15, 10, 6, 7, 0, 0, 0, 1, 1]]
    assert scale.tolist() == [[2.0, 2.0, 2.0, 0.375, 0.375]]
    nothing = integer_zeros(codes[:, :2], torch.zeros(1, 1).bfloat16(), torch.zeros(1, 1).bfloat16(), 2)
    assert nothing[0].tolist() == [[0, 0]] and nothing[1].tolist() == [[1.0]] and nothing[2].tolist() == [[0]]


def refused(packed, output, message):
    with pytest.raises(YardstickError, match=message) as error:
        run_export(packed, output)
    assert "\n" not in str(error.value) and not output.exists()


def test_what_could_not_be_loaded_is_refused(tmp_path, qwen2):
    short = write_packed(tmp_path / "short", qwen2, group_size=64)
    refused(short, tmp_path / "ct", r"short: tensor lm_head.weight has rows of 96 in groups of 64, but compressed")
    for number, keep in enumerate(("v_proj", "gate_proj")):
        packed = write_packed(tmp_path / f"{number}", qwen2, keep)
        refused(
            packed, tmp_path / "ct", rf"tensors .*\.{keep}\.weight.* are stored in different schemes, but vLLM joins"
        )
    packed = write_by_hand(tmp_path / "sizes", qwen2, lambda name: 48 if "k_proj" in name else 32)
    refused(packed, tmp_path / "ct", "tensors .*q_proj.weight, .*k_proj.weight, .* are stored in different schemes")
    plain = write_packed(tmp_path / "plain", qwen2, ".")
    refused(plain, tmp_path / "ct", "plain: holds no quantized tensor")


def test_other_folders_are_left_alone(tmp_path, qwen2):
    packed = write_packed(tmp_path / "packed", qwen2, "lm_head")
    refused(qwen2, tmp_path / "ct", "model.safetensors.index.json: no such file")
    with pytest.raises(YardstickError, match="packed: is there already; --output is a new folder"):
        run_export(packed, packed)
    (tmp_path / "ct").mkdir()
    run_export(packed, tmp_path / "ct")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ct", "packed"]
    (packed / "rest.safetensors").write_bytes((packed / "layer-00000.safetensors").read_bytes())
    with pytest.raises(YardstickError, match="packed"):
        run_export(packed, tmp_path / "again")


def test_what_some_readers_do_not_take_is_said(tmp_path, qwen2, capsys):
    run_export(write_packed(tmp_path / "packed", qwen2, group_size=48, keep="down_proj"), tmp_path / "ct")
    printed = capsys.readouterr()
    assert "the head is quantized" in printed.err and "groups of 48; vLLM's Marlin kernels" in printed.err
    assert printed.out.splitlines()[-1].startswith("| all |") and "lm_head.weight" in printed.out
