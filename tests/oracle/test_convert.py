"""Checkpoints of other formats, written by hand from codes, scales and zero points, and what the re-packer makes of
them: the same codes, and where bf16 is enough, the same weights bit for bit."""

import json
import shutil
from argparse import Namespace

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.oracle.test_awq_format import gemm, gemv
from tests.oracle.test_gptq_format import column, module, write_checkpoint
from tests.oracle.test_quark_format import grouped
from tests.tiny import write_tiny_model
from yardstick.cli import convert
from yardstick.errors import YardstickError
from yardstick.models.config import load_config
from yardstick.models.prefill import expected_tensors
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.pack import dequantize, unpack_nibbles
from yardstick.quantize.repack import change_report, decode, to_packing
from yardstick.sources import audit_source, open_source
from yardstick.sources.integers import Integers, checked_integers

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def ct_config(symmetric, group_size=32, **weights):
    weights = {"num_bits": 4, "symmetric": symmetric, "strategy": "group", "group_size": group_size} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized", "version": "0.19.0"}
    return method | {"config_groups": groups, "ignore": ["lm_head"]}


def quark_config(dtype, order):
    weight = {"dtype": dtype, "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "symmetric": dtype == "int4"}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": {"pack_method": order}}


def ct_module(codes, zeros, scales, name):
    """Codes [in, out], zero points and scales [groups, out], or no zero points."""
    tensors = {
        f"{name}.weight_packed": pack_to_int32(torch.tensor(codes.T - 8, dtype=torch.int8), 4),
        f"{name}.weight_scale": scales.T.contiguous(),
        f"{name}.weight_shape": torch.tensor(codes.T.shape),
    }
    if zeros is not None:
        packed = pack_to_int32(torch.tensor(zeros.T - 8, dtype=torch.int8), 4, packed_dim=0)
        tensors[f"{name}.weight_zero_point"] = packed.contiguous()
    return tensors


def with_scales(tensors, scales, name, part="scales"):
    """The helpers of the other tests write fp16; here the test says which type."""
    return tensors | {f"{name}.{part}": scales}


def gptq_module(minus):
    return lambda codes, zeros, scales, name: with_scales(
        module(codes, zeros, scales.float(), minus=minus, name=name), scales, name
    )


def awq_module(codes, zeros, scales, name):
    return with_scales(gemm(codes, zeros, scales.float(), name), scales, name)


def gemv_module(codes, zeros, scales, name):
    words = 4 * -(-len(zeros) // 32)  # groups of 32
    written = gemv(codes, zeros, scales.float(), words)
    return {f"{name}{part.removeprefix('m')}": tensor for part, tensor in written.items()}


def quark_module(signed, order):
    return lambda codes, zeros, scales, name: with_scales(
        grouped(codes - 8 * signed, zeros - 8 * signed, scales.float(), order, name), scales, name, "weight_scale"
    )


def quark_symmetric(codes, zeros, scales, name):
    tensors = quark_module(True, "order")(codes, zeros, scales, name)
    del tensors[f"{name}.weight_zero_point"]
    return tensors


def ct_symmetric(codes, zeros, scales, name):
    return ct_module(codes, None, scales, name)


# kind, config, writer of a module, type of the scales, zero points
FORMATS = {
    "ct-symmetric": ("ct", ct_config(True), ct_symmetric, torch.bfloat16, [8]),
    "ct-asymmetric": ("ct", ct_config(False), ct_module, torch.bfloat16, range(16)),
    "ct-powers": ("ct", ct_config(False), ct_module, torch.bfloat16, [0, 1, 2, 4, 8]),
    "gptq-v1": ("gptq", GPTQ | {"checkpoint_format": "gptq"}, gptq_module(1), torch.float16, range(16)),
    "gptq-v2": ("gptq", GPTQ | {"checkpoint_format": "gptq_v2"}, gptq_module(0), torch.float16, range(16)),
    "gptq-symmetric": ("gptq", GPTQ | {"sym": True}, gptq_module(1), torch.bfloat16, [8]),
    "awq-gemm": ("awq", AWQ, awq_module, torch.float16, range(16)),
    "awq-gemv": ("awq", AWQ | {"version": "gemv"}, gemv_module, torch.float16, range(16)),
    "quark-uint4": (
        "quark",
        quark_config("uint4", "reorder"),
        quark_module(False, "reorder"),
        torch.float32,
        range(16),
    ),
    "quark-int4": ("quark", quark_config("int4", "order"), quark_module(True, "order"), torch.float16, range(16)),
    "quark-symmetric": ("quark", quark_config("int4", "order"), quark_symmetric, torch.bfloat16, [8]),
}
EXACT = {"ct-symmetric", "ct-powers", "gptq-symmetric", "quark-symmetric"}


@pytest.fixture(autouse=True)
def threads():
    """The command works on one."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("convert") / "base", "qwen2", tied=True)
    shutil.copytree(folder, folder.parent / "config-only", ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def random_module(rng, rows, out, groups, dtype, zeros):
    codes, points = rng.integers(0, 16, (rows, out)), rng.choice(list(zeros), (groups, out))
    return codes, points, torch.tensor(rng.uniform(0.004, 0.03, (groups, out)), dtype=dtype)


def write_candidate(folder, base, name, size_of=lambda module: 32, change=None, head=False):
    """A folder in a format of the table, and what it is made of: matrix -> codes, zero points, scales. Norms, biases
    and the embedding are not those of the original, as after a smoothing."""
    _, config, write, dtype, zeros = FORMATS[name]
    rng, tensors, made = np.random.default_rng(5), {}, {}
    original = load_file(base / "model.safetensors")
    if head:
        original["lm_head.weight"] = original["model.embed_tokens.weight"].clone()
    for key, tensor in original.items():
        if not key.endswith("_proj.weight") and key != "lm_head.weight":
            tensors[key] = (tensor * 1.5).half()
            continue
        out, rows = tensor.shape
        size = size_of(key)
        made[key] = random_module(rng, rows, out, -(-rows // size), dtype, zeros)
        tensors |= write(*made[key], key.removesuffix(".weight"))
    folder.mkdir(exist_ok=True)
    write_checkpoint(folder, config | (change or {}), tensors)
    return folder, made, tensors


def run_convert(kind, folder, base, output, exact=False, record=None):
    # these codes do not resemble the original, so with its weights beside the config they would be refused
    if kind in ("quark", "gptq") and base.name == "base":
        base = base.parent / "config-only"
    convert.main(Namespace(spec=f"{kind}:{folder}", base=base, output=output, exact=exact, record=record))
    return json.loads((record or output / "convert.json").read_text())


def by_rows(values, count, size):
    """Groups [groups, out] to weights [out, in]."""
    return values.T[:, torch.arange(count) // size]


def check_packed(folder, base, made, tensors, size_of=lambda module: 32):
    """Codes, scales and minima of the new checkpoint against those that the old one was written from."""
    source, config = open_source(f"packed:{folder}"), load_config(base)
    audit_source(source, expected_tensors(config, source))
    stored = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    for name, (codes, zeros, scales) in made.items():
        stem, (rows, out), size = name.removesuffix(".weight"), codes.shape, size_of(name)
        assert torch.equal(unpack_nibbles(stored[f"{stem}.weight_codes"], rows), torch.tensor(codes.T).byte())
        assert torch.equal(stored[f"{stem}.weight_scales"], scales.T.bfloat16())
        minima = -torch.tensor(zeros.T) * scales.T.bfloat16().double()
        assert torch.equal(stored[f"{stem}.weight_minima"], minima.bfloat16())
        assert source.infos()[name].scheme == f"int4-g{size}" and source.infos()[name].shape == (out, rows)
    plain = {name: value for name, value in tensors.items() if name in expected_tensors(config, source)}
    assert plain and all(torch.equal(source.get(name), value) for name, value in plain.items() if name not in made)
    assert all(source.get(name).dtype == torch.float16 for name in plain if name not in made)
    return source


@pytest.mark.parametrize("name", FORMATS)
def test_the_codes_are_taken_over_and_what_bf16_changes_is_said(tmp_path, base, name, capsys):
    kind = FORMATS[name][0]
    folder, made, tensors = write_candidate(tmp_path / "theirs", base, name)
    record = run_convert(kind, folder, base, tmp_path / "ours")
    source = check_packed(tmp_path / "ours", base, made, tensors)
    original = open_source(f"{kind}:{folder}")
    reports = {report["name"]: report for report in record["tensors"]}
    assert list(reports) == [n for n in expected_tensors(load_config(base), source) if n in made]
    for key, (codes, zeros, scales) in made.items():
        theirs, ours, report = original.get(key), source.get(key), reports[key]
        exact = (scales.bfloat16().double() == scales.double()).numpy()
        products = torch.tensor(zeros) * scales.double()
        exact &= (products == products.bfloat16().double()).numpy()
        assert report["inexact_groups"] == int((~exact).sum()) and report["groups"] == exact.size
        same = by_rows(torch.tensor(exact), len(codes), 32)
        assert torch.equal(ours[same], theirs[same])
        if name in EXACT:
            assert torch.equal(ours, theirs) and report["greatest_change"] == report["relative_error"] == 0.0
            continue
        assert 0 < report["relative_error"] < 2**-7 and report["relative_error"] < report["greatest_change"]
        units = theirs.unflatten(1, (-1, 32)).abs().amax(-1)
        changes = (ours - theirs).unflatten(1, (-1, 32)).abs().amax(-1)
        assert report["greatest_change"] == pytest.approx(float((changes / units).max()), rel=1e-6)
    assert record["recipe"] == {"method": "convert", "kind": kind, "exact": False}
    assert set(record["files"]) == {"config.json", "model.safetensors"}
    printed = capsys.readouterr()
    rows = [line for line in printed.out.splitlines() if "_proj" in line]
    assert len(rows) == (0 if name in EXACT else len(made))
    assert f"{len(made) - len(rows)} of {len(made)} quantized tensors are exact, bit for bit" in printed.err


@pytest.mark.parametrize("name", ["ct-asymmetric", "gptq-v1"])
def test_exact_refuses_what_bf16_would_change(tmp_path, base, name):
    folder, _, _ = write_candidate(tmp_path / "theirs", base, name)
    first = f"{folder}: tensor {Q_PROJ} is not exact in bf16: scale or minimum of"
    with pytest.raises(YardstickError, match=first) as error:
        run_convert(FORMATS[name][0], folder, base, tmp_path / "ours", exact=True)
    assert "\n" not in str(error.value) and not (tmp_path / "ours" / "model.safetensors.index.json").exists()


def test_exact_takes_what_bf16_holds(tmp_path, base):
    folder, made, tensors = write_candidate(tmp_path / "theirs", base, "gptq-symmetric")
    record = run_convert("gptq", folder, base, tmp_path / "ours", exact=True, record=tmp_path / "elsewhere.json")
    assert record["recipe"]["exact"] is True and not (tmp_path / "ours/convert.json").exists()
    check_packed(tmp_path / "ours", base, made, tensors)


def test_groups_of_several_sizes_short_ones_and_whole_rows(tmp_path, base):
    def size_of(name):  # a short last group of 96 and of 160 columns, and one group of a row
        return 64 if "q_proj" in name else 1000 if "down_proj" in name else 48

    dynamic = {r"+:.*q_proj": {"group_size": 64}, r".*down_proj": {"group_size": 1000}, r".*": {"group_size": 48}}
    folder, made, tensors = write_candidate(tmp_path / "theirs", base, "gptq-v2", size_of, {"dynamic": dynamic})
    record = run_convert("gptq", folder, base, tmp_path / "ours")
    check_packed(tmp_path / "ours", base, made, tensors, size_of)
    groups = {report["name"]: report["groups"] for report in record["tensors"]}
    assert groups[Q_PROJ] == 2 * 96 and groups["model.layers.1.mlp.down_proj.weight"] == 96


@pytest.mark.parametrize("name", ["gptq-v1", "awq-gemm", "ct-asymmetric"])
def test_a_scale_for_each_row_is_one_group(tmp_path, base, name):
    def size_of(name):
        return 160 if "down_proj" in name else 96

    channel = {"config_groups": ct_config(False, None, strategy="channel")["config_groups"]}
    change = channel if name.startswith("ct") else {"group_size": -1}
    folder, made, tensors = write_candidate(tmp_path / "theirs", base, name, size_of, change)
    run_convert(FORMATS[name][0], folder, base, tmp_path / "ours")
    check_packed(tmp_path / "ours", base, made, tensors, size_of)


def test_a_quantized_head_of_a_tied_model_stays_a_tensor_of_its_own(tmp_path, base):
    folder, made, tensors = write_candidate(tmp_path / "theirs", base, "gptq-symmetric", head=True)
    run_convert("gptq", folder, base, tmp_path / "ours")
    source = check_packed(tmp_path / "ours", base, made, tensors)
    assert source.infos()["lm_head.weight"].scheme == "int4-g32"


def test_matrices_that_were_kept_stay_as_they_are(tmp_path, base):
    folder, made, tensors = write_candidate(tmp_path / "theirs", base, "ct-symmetric")
    kept = [name for name in made if "down_proj" in name]
    for name in kept:
        del made[name]
        for part in ("packed", "scale", "shape"):
            del tensors[f"{name}_{part}"]
        tensors[name] = torch.randn(96, 160).half()
    write_checkpoint(folder, FORMATS["ct-symmetric"][1], tensors)
    run_convert("ct", folder, base, tmp_path / "ours")
    check_packed(tmp_path / "ours", base, made, tensors)


def test_a_run_that_is_stopped_goes_on_and_ends_in_the_same_bytes(tmp_path, base, monkeypatch):
    folder, _, _ = write_candidate(tmp_path / "theirs", base, "awq-gemm")
    run_convert("awq", folder, base, tmp_path / "whole")
    finish, built = PackedWriter.finish_shard, []

    def stop_once(writer, shard):
        if len(built) == 1:
            raise KeyboardInterrupt
        built.append(shard)
        finish(writer, shard)

    monkeypatch.setattr(PackedWriter, "finish_shard", stop_once)
    with pytest.raises(KeyboardInterrupt):
        run_convert("awq", folder, base, tmp_path / "ours")
    monkeypatch.setattr(PackedWriter, "finish_shard", finish)
    run_convert("awq", folder, base, tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    for path in (tmp_path / "ours").iterdir():
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_a_folder_that_holds_something_is_not_written_to(tmp_path, base):
    folder, _, _ = write_candidate(tmp_path / "theirs", base, "gptq-symmetric")
    with pytest.raises(YardstickError, match=r"holds a checkpoint already \(model.safetensors\); --output is a new"):
        run_convert("gptq", folder, base, folder)
    run_convert("gptq", folder, base, tmp_path / "ours")
    with pytest.raises(YardstickError, match="ours: holds a checkpoint already"):
        run_convert("gptq", folder, base, tmp_path / "ours")


def test_a_conversion_that_was_stopped_in_its_last_check_goes_on(tmp_path, base, monkeypatch):
    folder, _, _ = write_candidate(tmp_path / "theirs", base, "gptq-symmetric")

    def stop(*_):
        raise KeyboardInterrupt

    check = convert.check_read_back
    monkeypatch.setattr(convert, "check_read_back", stop)
    with pytest.raises(KeyboardInterrupt):
        run_convert("gptq", folder, base, tmp_path / "ours")
    monkeypatch.setattr(convert, "check_read_back", check)
    with pytest.raises(YardstickError, match="ours: holds a checkpoint already"):  # by other settings
        run_convert("gptq", folder, base, tmp_path / "ours", exact=True)
    assert run_convert("gptq", folder, base, tmp_path / "ours")["tensors"]


def refused(tmp_path, base, kind, message):
    with pytest.raises(YardstickError, match=message) as error:
        run_convert(kind, tmp_path / "theirs", base, tmp_path / "ours")
    assert "\n" not in str(error.value)


def test_columns_in_another_order_are_refused(tmp_path, base):
    folder, _, tensors = write_candidate(tmp_path / "theirs", base, "gptq-v1")
    order = torch.arange(96).flip(0) // 32
    save_file(tensors | {Q_PROJ.replace("weight", "g_idx"): order.int()}, folder / "model.safetensors")
    refused(tmp_path, base, "gptq", f"tensor {Q_PROJ}: its groups are not 32 consecutive columns each")
    folder, _, tensors = write_candidate(tmp_path / "theirs", base, "ct-symmetric")
    save_file(tensors | {f"{Q_PROJ}_g_idx": order.int()}, folder / "model.safetensors")
    refused(tmp_path, base, "ct", f"tensor {Q_PROJ}: its groups are not 32 consecutive columns each")
    in_order = torch.arange(96).int() // 32
    save_file(tensors | {f"{Q_PROJ}_g_idx": in_order}, folder / "model.safetensors")
    run_convert("ct", folder, base, tmp_path / "ours")


def test_other_widths_and_blocks_of_rows_are_refused_by_name(tmp_path, base):
    name = "model.layers.1.mlp.down_proj"
    folder, made, tensors = write_candidate(tmp_path / "theirs", base, "ct-symmetric")
    groups = FORMATS["ct-symmetric"][1]["config_groups"]
    wide = {"targets": [name], "weights": {"num_bits": 8, "strategy": "group", "group_size": 32}}
    config = FORMATS["ct-symmetric"][1] | {"config_groups": groups | {"group_1": wide}}
    words = {f"{name}.weight_packed": torch.zeros(96, 40, dtype=torch.int32)}
    write_checkpoint(folder, config, tensors | words)
    refused(tmp_path, base, "ct", f"tensor {name}.weight is stored as ct-int8-g32, not as 4-bit integers")
    assert not (tmp_path / "ours").exists() or not any((tmp_path / "ours").iterdir())  # before anything was written

    whole = {"targets": [name], "weights": {"num_bits": 4, "strategy": "tensor"}}
    config = FORMATS["ct-symmetric"][1] | {"config_groups": groups | {"group_1": whole}}
    write_checkpoint(folder, config, tensors | {f"{name}.weight_scale": torch.ones(1).bfloat16()})
    refused(tmp_path, base, "ct", f"tensor {name}.weight is stored as ct-int4-tensor, where rows share a scale")

    _, config, write, *_ = FORMATS["gptq-v2"]
    folder, made, tensors = write_candidate(tmp_path / "theirs", base, "gptq-v2")
    tensors |= module(*wide_module(), bits=8, minus=0, name=name)
    write_checkpoint(folder, config | {"dynamic": {r".*1\.mlp\.down_proj": {"bits": 8}}}, tensors)
    refused(tmp_path, base, "gptq", f"tensor {name}.weight is stored as gptq-int8-g32, not as 4-bit integers")


def wide_module():
    return column([200] * 160, 96), np.full((5, 96), 128), np.full((5, 96), 0.01)


def test_what_is_no_int4_checkpoint_is_refused(tmp_path, base):
    for spec in ("hf:x", "fp8:x", "packed:x", "x"):
        with pytest.raises(YardstickError, match=f"source {spec}: only int4 checkpoints can be converted: ct:FOLDER"):
            convert.main(Namespace(spec=spec, base=base, output=tmp_path / "ours", exact=False, record=None))
    folder, _, tensors = write_candidate(tmp_path / "theirs", base, "gptq-v1")
    refused(tmp_path, tmp_path / "nowhere", "gptq", "nowhere: no such folder; --base is the original's")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    refused(tmp_path, base, "gptq", "tensor model.norm.weight is missing")
    shutil.rmtree(folder)
    refused(tmp_path, base, "gptq", "theirs: holds no model.safetensors")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_any_scale_that_bf16_holds_exactly_loses_nothing(rows, columns, size, seed):
    rng = np.random.default_rng(seed)
    groups = -(-columns // size)
    codes = torch.tensor(rng.integers(0, 16, (rows, columns)))
    zeros = torch.tensor(rng.choice([0, 1, 2, 4, 8], (rows, groups)))
    scales = torch.tensor(rng.normal(size=(rows, groups)) * 2.0 ** rng.integers(-30, 30), dtype=torch.bfloat16)
    stored = checked_integers("x", codes, scales, zeros, size)
    packed = to_packing(stored)
    assert change_report(stored, *packed[1:])["inexact_groups"] == 0
    weights = decode(stored, slice(None))
    assert torch.equal(dequantize(*packed, size), weights)


def test_a_change_is_counted_in_parts_of_the_greatest_weight_of_its_group():
    """Zero point 13 and scale 1 + 1/128: 13.1015625 lies between the bf16 numbers 13.0625 and 13.125."""
    codes, zeros = torch.tensor([[15, 13], [13, 13]]), torch.tensor([[13], [13]])
    stored = checked_integers("x", codes, torch.full((2, 1), 1 + 2**-7), zeros, 2)
    codes, scales, minima = to_packing(stored)
    assert minima.tolist() == [[-13.125], [-13.125]]
    report = change_report(stored, scales, minima)
    lost = 13.125 - 13.1015625
    assert report["inexact_groups"] == 2
    # the second row is all zeros: its change counts in steps
    assert report["greatest_change"] == pytest.approx(lost / (1 + 2**-7), rel=1e-6)
    assert report["relative_error"] == pytest.approx(2 * lost / (2 * (1 + 2**-7)), rel=1e-6)


def integers_of(kind, folder, config, tensors):
    """Integers of `m.weight`, whose weights must be those that the reader decodes."""
    folder.mkdir(exist_ok=True)
    source = open_source(f"{kind}:{write_checkpoint(folder, config, tensors)}")
    stored = source.integers("m.weight")
    assert torch.equal(decode(stored, slice(None)), source.get("m.weight"))
    return source, stored


def test_codes_in_bytes_and_scales_by_row(tmp_path):
    """compressed-tensors without packing, and Quark's file-to-file layout with its scales the other way round."""
    codes, _, scales = random_module(np.random.default_rng(8), 96, 24, 3, torch.float16, [8])
    signed = torch.tensor(codes.T - 8, dtype=torch.int8).contiguous()
    tensors = {"m.weight": signed, "m.weight_scale": scales.T.contiguous(), "n.weight": torch.ones(2, 2).half()}
    config = ct_config(True) | {"format": "naive-quantized"}
    source, stored = integers_of("ct", tmp_path / "ct", config, tensors)
    assert torch.equal(stored.codes, torch.tensor(codes.T).byte()) and stored.zeros.unique().tolist() == [8]
    with pytest.raises(YardstickError, match="tensor n.weight is stored as f16, not as 4-bit integers"):
        source.integers("n.weight")
    for weight, message in ((9, "tensor m.weight has a code of 17, outside"), (-9, "tensor m.weight has a code of -1")):
        with pytest.raises(YardstickError, match=message):
            integers_of("ct", tmp_path / "ct", config, tensors | {"m.weight": torch.full_like(signed, weight)})
    tensors = quark_symmetric(codes, np.full((3, 24), 8), scales, "m")
    tensors["m.weight_scale"] = scales.T.contiguous()
    _, stored = integers_of("quark", tmp_path / "quark", quark_config("int4", "order"), tensors)
    assert torch.equal(stored.codes, torch.tensor(codes.T).byte()) and torch.equal(stored.scales, scales.T.float())


def test_codes_outside_of_four_bits_and_scales_that_are_no_numbers_are_refused():
    codes, scales, zeros = torch.zeros(2, 4), torch.ones(2, 1), torch.zeros(2, 1)
    assert isinstance(checked_integers("x", codes, scales, zeros, 4), Integers)
    for damaged, message in (
        ((codes + 16, scales, zeros), "x has a code of 16, outside of 0..15"),
        ((codes - 1, scales, zeros), "x has a code of -1, outside of 0..15"),
        ((codes, scales, zeros + 40), "x has a zero point of 40, outside of 0..15"),
        ((codes, scales * float("nan"), zeros), r"x: its scale is not finite at \[0, 0\]"),
    ):
        with pytest.raises(YardstickError, match=message):
            checked_integers("x", *damaged[:3], 4)
