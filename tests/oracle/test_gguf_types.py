"""GGUF: every type on random blocks and on blocks worked out by hand, files in parts, and damaged files."""

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from yardstick.errors import YardstickError
from yardstick.sources import audit_source, open_source
from yardstick.sources.gguf import GgufSource, dequantize_gguf
from yardstick.sources.gguf_file import GgufFile, GgufTensor

# where the blocks hold fp16 numbers; random bits there would be NaN or infinity
HALVES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
    Type.IQ1_S: (0,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.BF16: (0,),  # an ordinary fp16 number is one in bf16 too
}
OTHER_SCALES = {Type.MXFP4, Type.NVFP4, Type.IQ1_M}  # a byte per block; fp16 spread over four words
DECODABLE = sorted(gguf.quants._type_traits, key=lambda kind: kind.name)


def random_bytes(kind: Type, rows: int, columns: int) -> np.ndarray:
    """uint8 [rows, bytes]: random but for the scales, which are finite."""
    rng = np.random.default_rng(int(kind))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    halves = (rng.standard_normal((len(blocks), 2)) * 0.1).astype(np.float16)
    for i, at in enumerate(HALVES.get(kind, ())):
        blocks[:, at : at + 2] = halves[:, i : i + 1].view(np.uint8)
    if kind == Type.MXFP4:
        blocks[:, 0] = rng.integers(100, 140, len(blocks))
    elif kind == Type.NVFP4:
        blocks[:, :4] = rng.integers(1, 127, (len(blocks), 4))
    elif kind == Type.IQ1_M:
        words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
        scale = halves[:, :1].view(np.uint16)
        blocks[:, 48:] = (
            (words & 0x0FFF | (scale >> np.array([0, 4, 8, 12]) & 15) << 12).astype(np.uint16).view(np.uint8)
        )
    return blocks.reshape(rows, -1)


def decode(kind: Type, data: bytes | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return dequantize_gguf(GgufTensor("x", shape, kind, np.frombuffer(bytes(data), dtype=np.uint8)))


def test_the_tables_of_this_test_name_every_type():
    assert set(HALVES) | OTHER_SCALES == set(DECODABLE) and len(DECODABLE) >= 23


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_random_blocks_decode_bit_for_bit_as_the_gguf_package_decodes_them(kind):
    """Two super-blocks a row (faults A1, A3, A4): a decoder that stops early or takes a wrong lane must fail."""
    data = random_bytes(kind, 3, 512)
    values = decode(kind, data, (3, 512))
    expected = gguf.quants.dequantize(data, kind).reshape(3, 512)
    assert values.dtype == np.float32 and np.isfinite(expected).all()
    assert np.abs(expected[:, 256:]).max() > 0 and not np.array_equal(expected[:, :256], expected[:, 256:])
    np.testing.assert_array_equal(values.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def test_q2_k_with_sixteen_different_scales():
    """Fault A3: of 128 values, 32 share two bits of each byte, and each 16 have a scale and a minimum."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, 64, dtype=np.uint8)
    scales = bytes((15 - i) << 4 | i for i in range(16))
    data = scales + codes.tobytes() + half(0.5) + half(0.25)
    expected = []
    for i in range(256):
        half_block, rest = divmod(i, 128)
        pair, lane = divmod(rest, 32)
        scale = scales[8 * half_block + 2 * pair + lane // 16]
        code = codes[32 * half_block + lane] >> (2 * pair) & 3
        expected.append(0.5 * (scale & 15) * code - 0.25 * (scale >> 4))
    assert decode(Type.Q2_K, data, (256,)).tolist() == expected


def test_q5_k_nibbles_and_fifth_bits():
    """Fault A4: both nibbles of a byte are 32 apart, and bit s of qh[l] belongs to value l of sub-block s."""
    ones = bytes([1] * 4 + [0] * 4 + [1] * 4)  # scale 1 and minimum 0 for all eight sub-blocks
    high, low = bytearray(32), bytearray(128)
    low[0] = 0x21
    values = decode(Type.Q5_K, half(1.0) + half(1.0) + ones + high + low, (256,))
    assert {i: v for i, v in enumerate(values.tolist()) if v} == {0: 1.0, 32: 2.0}
    high[3] = 1 << 5
    values = decode(Type.Q5_K, half(1.0) + half(1.0) + ones + high + bytes(128), (256,))
    assert {i: v for i, v in enumerate(values.tolist()) if v} == {5 * 32 + 3: 16.0}


def test_mxfp4_is_split_in_halves():
    """Fault A17: in ggml the nibbles of byte j are values j and j + 16; in safetensors they would be neighbours."""
    data = bytes([127, 0x21]) + bytes(15) + bytes([129, 0xF7]) + bytes(15)
    values = decode(Type.MXFP4, data, (64,))
    assert {i: v for i, v in enumerate(values.tolist()) if v} == {0: 0.5, 16: 1.0, 32: 24.0, 48: -24.0}


def test_nvfp4_is_split_in_halves_of_sixteen():
    """Four scales (E4M3: 0x38 is 1, 0x40 is 2), then eight bytes for each sixteen values."""
    data = bytes([0x38, 0x40, 0x38, 0x30]) + bytes([0x21]) + bytes(7) + bytes([0x05]) + bytes(15) + bytes([0xF0] * 8)
    values = decode(Type.NVFP4, data, (64,))
    found = {i: v for i, v in enumerate(values.tolist()) if v}
    assert found == {0: 0.5, 8: 1.0, 16: 6.0} | {48 + 8 + i: -3.0 for i in range(8)}


def test_q1_0_is_a_sign_for_each_bit():
    data = half(0.5) + bytes([0b00000101]) + bytes(15)
    assert decode(Type.Q1_0, data, (128,)).tolist() == [0.5, -0.5, 0.5] + [-0.5] * 125


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Type.F16, np.array([[1.5, -65504, 6e-8]], dtype=np.float16)),
        (Type.F64, np.array([[1 + 2.0**-50, -1e300]], dtype=np.float64)),
        (Type.I8, np.array([[-128, 127, 3]], dtype=np.int8)),
        (Type.I16, np.array([[-32768, 32767]], dtype=np.int16)),
        (Type.I32, np.array([[-(2**31), 2**31 - 1]], dtype=np.int32)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_plain_types_keep_every_value(kind, values):
    decoded = decode(kind, values.tobytes(), values.shape)
    assert decoded.dtype in (np.float32, np.float64) and decoded.tolist() == values.tolist()


def write(path, tensors, arch="llama", keys=(), **options):
    """A GGUF file by the `gguf` package; `tensors` maps names to fp arrays or to (bytes by row, type)."""
    writer = gguf.GGUFWriter(path, arch=arch, **options)
    writer.add_head_count(3)
    writer.add_head_count_kv(1)
    for key, value in keys:
        writer.add_uint32(key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Type.Q8_K, Type.Q8_1, Type.I64], ids=lambda kind: kind.name)
def test_a_type_without_a_decoder_is_refused_at_once(kind, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.ones((2, size), dtype=np.uint8)
    write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (data if block > 1 else data.view(np.int64), kind)})
    with pytest.raises(YardstickError, match=f"m.gguf: .*no decoder for {kind.name}"):
        open_source(f"gguf:{tmp_path / 'm.gguf'}")


def test_dimensions_are_listed_fastest_first_and_data_are_not_transposed(tmp_path):
    """Fault A13."""
    values = np.arange(40, dtype=np.float32).reshape(4, 10)
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": values})
    assert struct.pack("<IQQ", 2, 10, 4) in path.read_bytes()
    assert open_source(f"gguf:{path}").get("model.layers.0.mlp.up_proj.weight").tolist() == values.tolist()


def test_a_tensor_that_the_file_does_not_hold_is_refused_by_name(tmp_path):
    """Fault A14: 64 bytes by the header, 40 in the file."""
    path = write(tmp_path / "m.gguf", {"output_norm.weight": np.ones(16, dtype=np.float32)})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 24])
    with pytest.raises(YardstickError, match=f"tensor output_norm.weight needs bytes up to {len(data)}, the file has"):
        GgufFile(path)


def test_bits_are_those_of_whole_blocks(tmp_path):
    """Fault A1: 84, 110 and 176 bytes for 256 weights."""
    kinds = {"ffn_gate": Type.Q2_K, "ffn_up": Type.Q3_K, "attn_v": Type.Q5_K}
    tensors = {f"blk.0.{name}.weight": (random_bytes(kind, 3, 512), kind) for name, kind in kinds.items()}
    infos = open_source(f"gguf:{write(tmp_path / 'm.gguf', tensors)}").infos()
    assert {info.scheme: info.bits // 8 for info in infos.values()} == {
        "Q2_K": 6 * 84,
        "Q3_K": 6 * 110,
        "Q5_K": 6 * 176,
    }


def test_the_scale_beside_an_nvfp4_tensor_is_part_of_it(tmp_path):
    """llama.cpp multiplies the product by it; the scale of activations changes no weight."""
    data = random_bytes(Type.NVFP4, 6, 128)
    tensors = {
        "blk.0.attn_q.weight": (data, Type.NVFP4),
        "blk.0.attn_q.scale": np.array([0.375], dtype=np.float32),
        "blk.0.attn_q.input_scale": np.array([9.0], dtype=np.float32),
        "blk.0.ffn_up.weight": (data, Type.NVFP4),
    }
    source, name = open_source(f"gguf:{write(tmp_path / 'm.gguf', tensors)}"), "model.layers.0.self_attn.q_proj.weight"
    audit_source(source, {name: (6, 128), "model.layers.0.mlp.up_proj.weight": (6, 128)})
    plain = source.get("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(plain, torch.from_numpy(gguf.quants.dequantize(data, Type.NVFP4)))
    # three heads of two rows, whose order is the same in both layouts
    assert torch.equal(source.get(name), plain * 0.375)
    assert source.infos()[name].bits == 8 * data.size + 32
    assert list(source.ignored()) == ["blk.0.attn_q.input_scale"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.norm.weight"], "tensor model.norm.weight has no GGUF name"),
        (["blk.0.attn_q.weight"], "tensor blk.0.attn_q.weight has 4 rows, which do not fit 3 heads"),
    ],
)
def test_names_and_shapes_that_could_hide_an_order_of_rows_are_refused(names, message, tmp_path):
    path = write(tmp_path / "m.gguf", {name: np.ones((4, 32), dtype=np.float32) for name in names})
    with pytest.raises(YardstickError, match=message):
        open_source(f"gguf:{path}")


def test_the_prefix_is_the_models_own(tmp_path):
    names = ["token_embd.weight", "output.weight", "blk.0.ffn_up.weight"]
    path = write(tmp_path / "m.gguf", {name: np.ones((2, 32), dtype=np.float32) for name in names})
    stem = "model.language_model."
    expected = {f"{stem}embed_tokens.weight", "lm_head.weight", f"{stem}layers.0.mlp.up_proj.weight"}
    assert set(GgufSource(path, prefix=stem).infos()) == expected


def test_an_unknown_tensor_is_left_over(tmp_path):
    path = write(tmp_path / "m.gguf", {"loose": np.ones(4, dtype=np.float32)})
    source = open_source(f"gguf:{path}")
    assert source.get("loose").tolist() == [1.0] * 4 and len(source.rows("loose")[:]) == 4
    with pytest.raises(YardstickError, match="tensor loose is left over"):
        audit_source(source, {})


def test_an_architecture_that_is_not_certain_is_refused_by_name(tmp_path):
    for architecture in ("qwen3next", "qwen35moe", "llama4"):
        path = write(tmp_path / "m.gguf", {"output_norm.weight": np.ones(4, dtype=np.float32)}, arch=architecture)
        with pytest.raises(YardstickError, match=f"GGUF architecture {architecture} is not supported"):
            open_source(f"gguf:{path}")


# Files in parts (fault A15)


def write_parts(folder, rows=(5, 6, 7, 8, 9)) -> tuple[list, dict[str, np.ndarray]]:
    """Three parts by the `gguf` package's own splitting, two tensors in each but the last."""
    rng = np.random.default_rng(1)
    tensors = {f"blk.{i}.ffn_up.weight": rng.random((n, 64), dtype=np.float32) for i, n in enumerate(rows)}
    write(folder / "m.gguf", tensors, split_max_tensors=2)
    return sorted(folder.glob("m-*.gguf")), tensors


def test_any_part_opens_the_whole_file(tmp_path):
    paths, tensors = write_parts(tmp_path)
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in paths:
        source = open_source(f"gguf:{path}")
        assert len(source.infos()) == 5
        for i, values in enumerate(tensors.values()):
            assert source.get(f"model.layers.{i}.mlp.up_proj.weight").tolist() == values.tolist()
        assert GgufFile(path).value("general.architecture") == "llama"  # only the first part says so


def test_a_missing_part_is_named(tmp_path):
    paths, _ = write_parts(tmp_path)
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        with pytest.raises(YardstickError, match="^.*m-00002-of-00003.gguf: no such file; it is part 2 of 3, and all"):
            open_source(f"gguf:{path}")


def test_a_renamed_part_is_refused(tmp_path):
    paths, _ = write_parts(tmp_path)
    paths[0].rename(tmp_path / "whole.gguf")
    with pytest.raises(YardstickError, match="is part 1 of 3, so its name must end in -00001-of-00003.gguf"):
        open_source(f"gguf:{tmp_path / 'whole.gguf'}")
    (tmp_path / "whole.gguf").rename(paths[1])
    with pytest.raises(YardstickError, match="is part 1 of 3, so its name must end in -00001-of-00003.gguf"):
        open_source(f"gguf:{paths[1]}")
    paths[1].rename(paths[0])
    paths[0].with_name("m-00002-of-00003.gguf").write_bytes(paths[2].read_bytes())
    with pytest.raises(YardstickError, match="m-00002-of-00003.gguf: is not part 2 of the 3 parts of m-00001"):
        open_source(f"gguf:{paths[0]}")


def test_parts_of_two_files_are_not_mixed(tmp_path):
    (tmp_path / "other").mkdir()
    paths, _ = write_parts(tmp_path)
    others, _ = write_parts(tmp_path / "other", rows=(5, 6, 7, 8, 9, 10))
    paths[2].write_bytes(others[2].read_bytes())
    with pytest.raises(YardstickError, match="m-00003-of-00003.gguf: is not part 3 of the 3 parts of m-00001"):
        open_source(f"gguf:{paths[0]}")


def write_two(folder, first, second, total, alignment=None):
    """Two parts with hand-written keys."""
    for i, names in enumerate((first, second)):
        keys = [("split.no", i), ("split.count", 2), ("split.tensors.count", total)]
        keys += [("general.alignment", alignment)] if alignment and not i else []
        write(
            folder / f"t-0000{i + 1}-of-00002.gguf", {name: np.ones(64, dtype=np.float32) for name in names}, keys=keys
        )
    return folder / "t-00001-of-00002.gguf"


def test_parts_that_do_not_add_up_are_refused(tmp_path):
    path = write_two(tmp_path, ["a", "b"], ["c"], 3)
    assert set(open_source(f"gguf:{path}").infos()) == {"a", "b", "c"}
    path = write_two(tmp_path, ["a", "b"], ["b"], 3)
    with pytest.raises(YardstickError, match="t-00002-of-00002.gguf: tensor b is in t-00001-of-00002.gguf too"):
        open_source(f"gguf:{path}")
    path = write_two(tmp_path, ["a", "b"], ["c"], 4)
    with pytest.raises(YardstickError, match="its 2 parts hold 3 tensors, must be 4"):
        open_source(f"gguf:{path}")
    path = write_two(tmp_path, ["a", "b"], ["c"], 3, alignment=16)
    with pytest.raises(YardstickError, match="t-00002-of-00002.gguf: general.alignment is 32, but 16 in the first"):
        open_source(f"gguf:{path}")


# Damage

MEGABYTE = 2**20


def sound_file(folder):
    """A small file with metadata of all kinds."""
    writer = gguf.GGUFWriter(folder / "sound.gguf", arch="qwen35")
    for add in (writer.add_block_count, writer.add_ssm_group_count, writer.add_ssm_state_size):
        add(2)
    writer.add_nextn_predict_layers(1)
    writer.add_ssm_time_step_rank(6)
    writer.add_custom_alignment(32)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "<|x|>"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    writer.add_float64("x.f", 1.0)
    writer.add_bool("x.b", True)
    rng = np.random.default_rng(3)
    writer.add_tensor("output_norm.weight", rng.random(16, dtype=np.float32))
    for name, kind in (("attn_gate", Type.Q8_0), ("attn_qkv", Type.Q4_0), ("ssm_out", Type.F32)):
        data = random_bytes(kind, 20, 32) if kind != Type.F32 else rng.random((8, 12), dtype=np.float32)
        data = data[:12] if name == "attn_gate" else data
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    writer.add_tensor("blk.0.ssm_a", -rng.random(6, dtype=np.float32))
    writer.add_tensor("blk.1.attn_q.weight", random_bytes(Type.IQ4_XS, 2, 256), raw_dtype=Type.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "sound.gguf").read_bytes()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return sound_file(tmp_path_factory.mktemp("sound"))


def read_all(path) -> int:
    """How many tensors can be read, each whole and by rows; anything but a one-line YardstickError is a failure."""
    try:
        source = open_source(f"gguf:{path}")
    except YardstickError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return 0
    count = 0
    for name in source.infos():
        for read in (source.get, lambda name: source.rows(name)[:3]):
            try:
                read(name)
                count += 1
            except YardstickError as error:
                assert "\n" not in str(error)
    return count


def test_the_sound_file_is_sound(sound, tmp_path):
    (tmp_path / "m.gguf").write_bytes(sound)
    assert read_all(tmp_path / "m.gguf") == 2 * 6


NUMBERS = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**33, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
CHANGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7) | NUMBERS.map(lambda n: n + 8)), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(changes=CHANGES, keep=st.none() | st.floats(0, 1))
def test_damage_ends_in_one_line_and_takes_no_memory(sound, tmp_path_factory, changes, keep):
    """Flipped bits, absurd 64-bit numbers anywhere in the header, and a file cut short."""
    data, header = bytearray(sound), sound.index(b"blk.1.attn_q.weight") + 60
    for place, change in changes:
        at = int(place * header)
        if change < 8:
            data[at] ^= 1 << change
        else:
            data[at : at + 8] = struct.pack("<Q", change - 8 & 2**64 - 1)
    data = data if keep is None else data[: int(keep * len(data))]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read_all(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * MEGABYTE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", [2**24 + 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("at", [8, 16, 24], ids=["tensors", "keys", "length of the first key"])
def test_absurd_counts_are_refused(sound, tmp_path, at, number):
    data = bytearray(sound)
    data[at : at + 8] = struct.pack("<Q", number)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(YardstickError, match=f"m.gguf: truncated or not a GGUF file .{number}"):
        GgufFile(tmp_path / "m.gguf")


def replaced(data: bytes, name: bytes, skip: int, form: str, *values) -> bytes:
    """`values` written `skip` bytes after the end of the only place that holds `name`."""
    assert data.count(name) == 1
    at, changed = data.index(name) + len(name) + skip, bytearray(data)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


def entry(data: bytes, name: bytes, form: str, *values) -> bytes:
    """The entry of a matrix in the tensor table, written over: dimensions, sizes, type, offset."""
    return replaced(data, name, 0, form, *values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: entry(d, b"ssm_out.weight", "<I", 5),
            "tensor blk.0.ssm_out.weight has 5 dimensions, must be 1 to 4",
        ),
        (lambda d: entry(d, b"ssm_out.weight", "<I", 2**32 - 1), "has 4294967295 dimensions, must be 1 to 4"),
        (lambda d: entry(d, b"ssm_out.weight", "<IQ", 2, 0), r"has shape \[8, 0\], which holds nothing"),
        (lambda d: entry(d, b"ssm_out.weight", "<IQQI", 2, 12, 8, 99), "has type number 99, which is not known"),
        (lambda d: entry(d, b"ssm_out.weight", "<IQQIQ", 2, 12, 8, 0, 4), "begins at 4, not aligned to 32"),
        (lambda d: entry(d, b"ssm_out.weight", "<IQQIQ", 2, 12, 8, 0, 0), "tensors .* and .* overlap"),
        (lambda d: entry(d, b"attn_qkv.weight", "<IQ", 2, 33), "has 33 columns, not whole Q4_0 blocks"),
        (lambda d: replaced(d, b"general.alignment", 4, "<I", 0), "general.alignment is 0, must be a power of two"),
        (lambda d: replaced(d, b"general.alignment", 4, "<I", 48), "general.alignment is 48, must be a power of two"),
        (lambda d: replaced(d, b"qwen35.block_count", 0, "<I", 6), "block_count is .*, not a whole number"),
        (
            lambda d: replaced(d, b"qwen35.ssm.time_step_rank", 4, "<I", 5),
            "5 value heads, 2 key heads of width 2: no fit",
        ),
        (lambda d: d.replace(b"x.f", b"x.b"), "GGUF metadata key x.b is there twice"),
        (lambda d: d.replace(b"blk.0.attn_gate", b"blk.0.attn_gatt").replace(b"gatt", b"q\xff\xfe\xfd"), "utf-8"),
    ],
)
def test_each_kind_of_damage_has_its_line(sound, tmp_path, change, message):
    (tmp_path / "m.gguf").write_bytes(change(sound))
    with pytest.raises(YardstickError, match=f"m.gguf: .*{message}"):
        open_source(f"gguf:{tmp_path / 'm.gguf'}")


def test_arrays_in_arrays_do_not_run_out_of_stack(tmp_path):
    nested = struct.pack("<IQ", 9, 1) * 5000
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + nested
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(YardstickError, match="m.gguf: truncated or not a GGUF file"):
        GgufFile(tmp_path / "m.gguf")


def test_the_same_tensor_under_two_names_is_refused(tmp_path):
    """Bytes of equal length: the second name becomes the first."""
    path = write(tmp_path / "m.gguf", {f"blk.{i}.ffn_up.weight": np.ones((2, 32), dtype=np.float32) for i in (0, 1)})
    path.write_bytes(path.read_bytes().replace(b"blk.1", b"blk.0"))
    with pytest.raises(YardstickError, match="tensor blk.0.ffn_up.weight is there twice"):
        open_source(f"gguf:{path}")
