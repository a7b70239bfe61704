"""Damaged checkpoints of every format: one line of ours that names the thing, or the values that were meant.

Each format has a small sound checkpoint, made with the builders of its oracle test. Damage is seeded. What no reader
can see is left out: another value of the same type in the same place, such as two parts of equal shape swapped, or one
16-bit float type taken for the other.
"""

import json
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from tests.oracle import test_awq_format as awq
from tests.oracle import test_bitsandbytes as bnb
from tests.oracle import test_compressed_tensors as ct
from tests.oracle import test_fp8 as fp8
from tests.oracle import test_gguf_types as gguf_types
from tests.oracle import test_gptq_format as gptq
from tests.oracle import test_hqq as hqq
from tests.oracle import test_modelopt as modelopt
from tests.oracle import test_quark_format as quark
from yardstick.cli import inspect as inspect_step
from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.grid import Grid, round_to_nearest
from yardstick.quantize.run_trellis import encoded
from yardstick.quantize.trellis_search import quantize_trellis
from yardstick.sources import audit_source, open_source

UP, DOWN, NORM = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.norm"
PLAIN = {f"{NORM}.weight": torch.linspace(0.5, 1.5, 20).bfloat16(), f"{UP}.bias": torch.linspace(-1, 1, 24).bfloat16()}
SECONDS, BYTES = 10, 1 << 30  # a damaged file may cost neither


def plain_shards(folder: Path) -> str:
    tensors = [PLAIN, {f"{UP}.weight": torch.randn(24, 48).bfloat16(), f"{DOWN}.weight": torch.randn(20, 24).half()}]
    index = {}
    for i, shard in enumerate(tensors):
        save_file(shard, folder / f"shard-{i}.safetensors")
        index |= dict.fromkeys(shard, f"shard-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return f"hf:{folder}"


def packed(folder: Path) -> str:
    writer = PackedWriter(folder, "d")
    for name, shape in ((UP, (24, 47)), (DOWN, (20, 24))):
        codes, scales, minima = round_to_nearest(torch.randn(shape), Grid(16))
        writer.add_quantized(f"{name}.weight", codes, scales, minima, 16)
    for name, tensor in PLAIN.items():
        writer.add_plain(name, tensor)
    writer.finish_shard("only")
    writer.finish(["only"], {"method": "rtn"}, folder / "no-model")
    return without_digests("packed", folder)


def without_digests(kind: str, folder: Path) -> str:
    """With them every changed byte is found at once."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["metadata"]["yardstick"]["sha256"]
    index.write_text(json.dumps(content))
    return f"{kind}:{folder}"


def trellis(folder: Path) -> str:
    writer = PackedWriter(folder, "d")
    for name, shape in ((UP, (70, 47)), (DOWN, (20, 24))):
        result = quantize_trellis(torch.randn(shape), torch.eye(shape[1]), 8, 0.01, name)
        writer.add_encoded(f"{name}.weight", *encoded(result, shape, 8))
    for name, tensor in PLAIN.items():
        writer.add_plain(name, tensor)
    writer.finish_shard("only")
    writer.finish(["only"], {"method": "trellis"}, folder / "no-model")
    return without_digests("trellis", folder)


def gguf_file(folder: Path) -> str:
    rng = np.random.default_rng(5)
    tensors = {
        "output_norm.weight": rng.random(20, dtype=np.float32),
        "blk.0.attn_q.weight": (gguf_types.random_bytes(Type.Q8_0, 12, 64), Type.Q8_0),
        "blk.0.attn_k.weight": (gguf_types.random_bytes(Type.Q4_0, 4, 64), Type.Q4_0),
        "blk.0.ffn_up.weight": (gguf_types.random_bytes(Type.Q4_K, 3, 256), Type.Q4_K),
        "blk.0.ffn_down.weight": rng.random((20, 24), dtype=np.float32),
    }
    return f"gguf:{gguf_types.write(folder / 'm.gguf', tensors)}"


def gptq_folder(folder: Path) -> str:
    rng = np.random.default_rng(1)
    codes, zeros = rng.integers(0, 16, (48, 24)), rng.integers(1, 16, (3, 24))
    order = rng.permutation(np.arange(48) // 16).tolist()
    tensors = gptq.module(codes, zeros, rng.uniform(0.1, 2, (3, 24)), g_idx=order, name=UP)
    codes, zeros = rng.integers(0, 256, (24, 20)), rng.integers(1, 256, (2, 20))
    tensors |= gptq.module(codes, zeros, rng.uniform(0.1, 2, (2, 20)), bits=8, name=DOWN)
    rules = {".*down_proj": {"bits": 8, "group_size": 12, "desc_act": False}, "-:lm_head": {}}
    settings = gptq.PLAIN | {"group_size": 16, "desc_act": True, "dynamic": rules, "meta": {"quantizer": ["x:1.0"]}}
    return f"gptq:{gptq.write_checkpoint(folder, settings, tensors | PLAIN)}"


def awq_gemm(folder: Path) -> str:
    rng, tensors = np.random.default_rng(2), dict(PLAIN)
    for name, rows, out in ((UP, 48, 24), (DOWN, 24, 20)):
        tensors |= awq.gemm(*awq.random_module(rng, rows, out, -(-rows // 16)), name=name)
    settings = awq.PLAIN | {"group_size": 16, "modules_to_not_convert": ["lm_head"]}
    return f"awq:{gptq.write_checkpoint(folder, settings, tensors)}"


def awq_gemv(folder: Path) -> str:
    codes, zeros, scales = awq.random_module(np.random.default_rng(3), 160, 24, 5)
    tensors = {name.replace("m.", f"{UP}."): part for name, part in awq.gemv(codes, zeros, scales, 4).items()}
    return f"awq:{gptq.write_checkpoint(folder, awq.PLAIN | {'version': 'gemv', 'group_size': 32}, tensors | PLAIN)}"


def quark_folder(folder: Path) -> str:
    rng = np.random.default_rng(4)
    codes, zeros = rng.integers(0, 16, (48, 24)), rng.integers(0, 16, (3, 24))
    tensors = quark.grouped(codes, zeros, rng.uniform(0.1, 2, (3, 24)), "reorder", UP)
    tensors |= {f"{DOWN}.weight": fp8.random_codes((20, 24)), f"{DOWN}.weight_scale": torch.rand(20) + 0.5}
    rows = quark.FP8 | {"qscheme": "per_channel", "ch_axis": 0}
    settings = quark.config(quark.WEIGHT | {"group_size": 16}, layer_quant_config={"*down_proj": {"weight": rows}})
    return f"quark:{gptq.write_checkpoint(folder, settings | {'exclude': ['lm_head']}, tensors | PLAIN)}"


def bnb_folder(folder: Path) -> str:
    four, _ = bnb.quantize((24, 48), "nf4", 64, nested=True)
    tensors = {name.replace(bnb.LAYER, UP): part for name, part in four.items()}
    tensors |= {f"{DOWN}.weight": torch.randint(-127, 128, (20, 24)).to(torch.int8), f"{DOWN}.SCB": torch.rand(20) + 1}
    tensors[f"{DOWN}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return bnb.save(folder, tensors | PLAIN)


def hqq_states(encoded: bool) -> dict[str, dict]:
    shapes = ((UP, (24, 48), 4, 1), (DOWN, (20, 24), 3, 0))
    return {name: hqq.linear(shape, bits, 12, axis, encoded)[1] for name, shape, bits, axis in shapes}


def hqq_tensors(folder: Path) -> str:
    states = hqq_states(encoded=True)
    tensors = {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    return hqq.save_tensors(folder, tensors | PLAIN)


def hqq_pickle(folder: Path) -> str:
    return hqq.save_pickle(folder, hqq_states(encoded=False) | {NORM: {"weight": PLAIN[f"{NORM}.weight"]}})


def fp8_folder(folder: Path) -> str:
    tensors = {f"{UP}.weight": fp8.random_codes((24, 48)), f"{UP}.weight_scale_inv": torch.rand(3, 4) + 0.5}
    exponents = torch.randint(120, 130, (3, 2), dtype=torch.uint8)
    tensors |= {f"{DOWN}.weight": fp8.random_codes((20, 24)), f"{DOWN}.weight_scale_inv": exponents}
    return fp8.save(folder, tensors | PLAIN, (8, 12), modules_to_not_convert=["lm_head"])


def modelopt_folder(folder: Path) -> str:
    tensors = modelopt.nvfp4(24, 3, name=UP) | modelopt.fp8((20, 24), name=DOWN)
    layers = {UP: {"quant_algo": "NVFP4"}, DOWN: {"quant_algo": "FP8"}}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["lm_head"]}
    return modelopt.save(folder, tensors | PLAIN, **settings)


def ct_folder(folder: Path) -> str:
    cases = {
        UP: ("pack-quantized", (24, 48), {"num_bits": 4, **ct.GROUP, "symmetric": False}),
        "a": ("nvfp4-pack-quantized", (22, 48), ct.NVFP4),
        "b": ("float-quantized", (18, 28), ct.FP8 | {"strategy": "block", "block_structure": [4, 8]}),
        "c": ("mxfp4-pack-quantized", (14, 96), ct.MXFP4),
        "d": ("int-quantized", (20, 26), {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        "e": ("pack-quantized", (40, 60), {"num_bits": 3, "strategy": "channel"}),
    }
    modules = {
        name: ct.compress(form, ct.random_weight(*shape), **args)[0] for name, (form, shape, args) in cases.items()
    }
    groups = [ct.group([name], form, **args) for name, (form, _, args) in cases.items()]
    modules[NORM] = {"weight": PLAIN[f"{NORM}.weight"]}
    return f"ct:{ct.write(folder, modules, groups, ignore=['lm_head'])}"


def decoded_folder(folder: Path) -> str:
    save_file(PLAIN | {f"{UP}.weight": torch.randn(24, 48).half()}, folder / "model.safetensors")
    stored = {"tensors": {f"{UP}.weight": {"scheme": "exl3-4bit", "bits": 24 * 48 * 4 + 1152}}}
    (folder / "stored.json").write_text(json.dumps(stored))
    return f"bf16dir:{folder}"


BUILDERS = {
    "hf": plain_shards,
    "bf16dir": decoded_folder,
    "packed": packed,
    "trellis": trellis,
    "gguf": gguf_file,
    "ct": ct_folder,
    "gptq": gptq_folder,
    "awq-gemm": awq_gemm,
    "awq-gemv": awq_gemv,
    "quark": quark_folder,
    "bnb": bnb_folder,
    "hqq": hqq_tensors,
    "hqq-pickle": hqq_pickle,
    "fp8": fp8_folder,
    "modelopt": modelopt_folder,
}


@dataclass
class Sound:
    """A sound checkpoint: its files, and what they decode to."""

    kind: str
    folder: Path
    path: str  # relative to the folder; empty for the folder itself
    files: dict[str, bytes]
    values: dict[str, torch.Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.values.items()}

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.folder / self.path}"

    def write(self, **changes: bytes | None) -> None:
        """The files, some with other bytes or, for None, without them."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, data in (self.files | changes).items():
            if data is not None:
                (self.folder / name).write_bytes(data)

    def tensor_files(self) -> list[str]:
        return [name for name in self.files if name.endswith(".safetensors")]


@pytest.fixture(scope="module", params=BUILDERS)
def sound(request, tmp_path_factory) -> Sound:
    torch.manual_seed(3)
    return build(BUILDERS[request.param], tmp_path_factory.mktemp(request.param) / "checkpoint")


def build(builder: Callable[[Path], str], folder: Path) -> Sound:
    folder.mkdir()
    kind, _, path = builder(folder).partition(":")
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    source = open_source(f"{kind}:{path}")
    values = {name: source.get(name) for name in source.infos() if name not in source.ignored()}
    relative = str(Path(path).relative_to(folder))
    return Sound(kind, folder, relative, files, values)


@pytest.fixture(autouse=True)
def limits():
    """No gigabyte is allocated, and nothing hangs: then torch's error or this alarm fails the test."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, before[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def ring(*_) -> None:
    raise AssertionError("a damaged checkpoint keeps the reader busy")


def read(sound: Sound) -> dict[str, torch.Tensor] | str:
    """All tensors, or the one line that refuses them. Any other exception is a failure."""
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        source = open_source(sound.spec)
        audit_source(source, sound.shapes)
        values = {name: source.get(name) for name in sound.shapes}
        for name in sound.shapes:
            assert torch.equal(source.rows(name)[0:3], values[name][0:3])
    except YardstickError as error:
        line = str(error)
        assert len(line.splitlines()) == 1 and len(line) < 3000
        assert str(sound.folder) in line, f"does not say where: {line}"
        return line
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for name, shape in sound.shapes.items():
        assert tuple(values[name].shape) == shape and bool(torch.isfinite(values[name]).all()), name
    return values


def unchanged(sound: Sound, found: dict[str, torch.Tensor] | str) -> bool:
    return not isinstance(found, str) and all(
        torch.equal(found[name].double(), values.double()) for name, values in sound.values.items()
    )


def header_of(data: bytes) -> tuple[dict, bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header: dict | str, body: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def test_the_sound_checkpoints_are_sound(sound):
    sound.write()
    assert unchanged(sound, read(sound))
    assert len(sound.values) >= 3 and all(values.count_nonzero() for values in sound.values.values())


# Files


def test_a_truncated_file_is_refused(sound):
    for name, data in sound.files.items():
        if name == "config.json" and sound.kind in ("hqq", "hf", "packed"):
            continue  # not read
        lengths = {0, 1, 7, 8, 9, len(data) // 3, len(data) // 2, len(data) - 33, len(data) - 1}
        for length in sorted(length for length in lengths if 0 <= length < len(data)):
            sound.write(**{name: data[:length]})
            found = read(sound)
            padding = name.endswith(".gguf") and len(data) - length < 32  # after the last tensor
            assert isinstance(found, str) or (padding and unchanged(sound, found)), (name, length)


def test_a_file_with_something_after_its_end_is_refused(sound):
    for name, data in sound.files.items():
        if name.endswith((".safetensors", ".gguf")):
            sound.write(**{name: data + bytes(64)})
            assert isinstance(read(sound), str), name


def test_another_file_in_its_place_is_refused(sound, tmp_path):
    gguf_file(tmp_path)
    save_file({"x.weight": torch.ones(3)}, tmp_path / "other.safetensors")
    others = [(tmp_path / "m.gguf").read_bytes(), (tmp_path / "other.safetensors").read_bytes(), b"", b"\0" * 4096]
    torch.save({"x": {"weight": torch.ones(3)}}, tmp_path / "q.pt")
    others += [
        (tmp_path / "q.pt").read_bytes(),
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b"[" * 200_000,
        b"9" * 5000,
        b"\xff\xfe{",
    ]
    others += [b"{}", b'{"quantization_config": {}}', b'{"a": ' * 5000]
    for name in sound.files:
        if name == "config.json" and sound.kind in ("hqq", "hf", "packed"):
            continue
        for data in others:
            if data == sound.files[name]:
                continue
            sound.write(**{name: data})
            assert isinstance(read(sound), str), (name, data[:20])
        sound.write(**{name: None})
        # decoded weights may come without bits of their own
        assert name == "stored.json" or isinstance(read(sound), str), name
        (sound.folder / name).mkdir()
        assert isinstance(read(sound), str), name
    shutil.rmtree(sound.folder)
    assert isinstance(read(sound), str)
    sound.folder.write_text("a file")
    assert isinstance(read(sound), str)
    sound.folder.unlink()


def test_a_file_that_is_cut_while_it_is_open_is_refused(sound):
    """A mapped page that is gone would end the process with a signal."""
    sound.write()
    source = open_source(sound.spec)
    for name in sound.files:
        if not name.endswith(".json"):
            (sound.folder / name).write_bytes(b"")
    for name in sound.shapes:
        with pytest.raises(YardstickError, match="has become shorter|ends inside tensor") as error:
            source.get(name)
        assert str(sound.folder) in str(error.value)


def flips(data: bytes, stop: int, count: int, seed: int) -> Iterator[bytes]:
    """Copies with one to three bytes before `stop` changed: by a bit, or to any other value."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        changed = bytearray(data)
        for at in rng.integers(0, stop, rng.integers(1, 4)):
            changed[at] = (
                changed[at] ^ 1 << int(rng.integers(0, 8)) if rng.random() < 0.5 else int(rng.integers(0, 256))
            )
        yield bytes(changed)


def test_changed_bytes_of_a_header_are_refused_or_harmless(sound):
    for name in sound.tensor_files():
        data = sound.files[name]
        for changed in flips(data, 8 + int.from_bytes(data[:8], "little"), 100, seed=len(data)):
            sound.write(**{name: changed})
            found = read(sound)
            assert isinstance(found, str) or unchanged(sound, found), changed[:2000]


def test_changed_bytes_elsewhere_never_crash(sound):
    """Numbers of a config and values of a tensor may become others of their kind, which nobody can see."""
    for name, data in sound.files.items():
        for changed in flips(data, len(data), 60, seed=1 + len(data)):
            sound.write(**{name: changed})
            read(sound)


# Values of a config, an index, a header


WRONG = [None, True, "", "x", "\ud800\n", [], ["x"], [[]], {}, {"x": {"y": []}}, -1, 0, 1, 1.5, 2**31, 10**30, 1e300]
WRONG += [float("nan"), "9" * 5000, "(", ["re:("], ["re:a{99999999999}", 3], ["re:" + "(" * 2000], list(range(50))]


def some(rng, count: int) -> list:
    """A few of the wrong values; over all places each comes up."""
    return [WRONG[i] for i in rng.choice(len(WRONG), count, replace=False)]


def places(value, path=()) -> Iterator[tuple]:
    """The place of every value in a JSON document."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed_at(document, path: tuple, value, drop: bool = False):
    """A copy of the document with another value at one place, or without that place."""
    if not path:
        return value
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if drop:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


def documents(sound: Sound) -> Iterator[tuple[str, object, tuple]]:
    for name in sound.files:
        if name.endswith(".json"):
            document = json.loads(sound.files[name])
            yield from ((name, document, path) for path in places(document))


def test_values_of_another_kind_in_a_config_or_index_never_crash(sound):
    """Whether a changed setting is refused depends on the setting; a setting that is read as before is harmless."""
    refused, rng = 0, np.random.default_rng(11)
    for name, document, path in documents(sound):
        for value in some(rng, 8):
            sound.write(**{name: json.dumps(changed_at(document, path, value)).encode()})
            refused += isinstance(read(sound), str)
        if path:
            sound.write(**{name: json.dumps(changed_at(document, path, None, drop=True)).encode()})
            refused += isinstance(read(sound), str)
    assert refused > 20 or sound.kind in ("gguf", "hqq", "bnb")


def test_values_of_another_kind_in_a_header_are_refused(sound):
    rng = np.random.default_rng(12)
    for name in sound.tensor_files():
        header, body = header_of(sound.files[name])
        for tensor in header:
            for path in places(header[tensor], (tensor,)):
                for value in some(rng, 3):
                    sound.write(**{name: with_header(changed_at(header, path, value), body)})
                    found = read(sound)
                    assert isinstance(found, str) or unchanged(sound, found), (path, value)
                sound.write(**{name: with_header(changed_at(header, path, None, drop=True), body)})
                found = read(sound)
                assert isinstance(found, str) or unchanged(sound, found), path


# Tensors of another shape, type or name


def rewritten(sound: Sound, name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, sound.folder / name)


def reshaped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """One row or column less or more, one in all (which would broadcast), none, turned round, flat, an axis more."""
    for axis, size in enumerate(tensor.shape):
        yield tensor.narrow(axis, 0, size - 1)
        yield tensor.narrow(axis, 0, 1)
        yield tensor.narrow(axis, 0, 0)
        yield torch.cat([tensor, tensor.narrow(axis, 0, 1)], dim=axis) if tensor.element_size() > 1 else tensor[:0]
    yield tensor.flatten()
    yield tensor.flatten()[:1]
    yield tensor.flatten()[0] if tensor.numel() else tensor
    yield tensor.unsqueeze(0)
    yield tensor.unsqueeze(-1)
    if tensor.ndim == 2:
        yield tensor.T
        yield tensor.reshape(-1, 1)
        yield tensor.reshape(1, -1)


def module_of(name: str) -> str:
    stem = name.partition(".quant_state")[0]
    return stem.rpartition(".")[0]


def test_a_tensor_of_another_shape_is_refused_by_name_and_never_broadcast(sound):
    for name in sound.tensor_files():
        sound.write()
        tensors = load_file(sound.folder / name)
        for key, tensor in tensors.items():
            for other in reshaped(tensor):
                if other.shape == tensor.shape:
                    continue
                rewritten(sound, name, tensors | {key: other})
                found = read(sound)
                assert isinstance(found, str) or unchanged(sound, found), (key, tensor.shape, other.shape)
                assert not isinstance(found, str) or module_of(key).removesuffix(".weight") in found, (key, found)


def test_a_missing_tensor_is_refused_by_name(sound):
    for name in sound.tensor_files():
        sound.write()
        tensors = load_file(sound.folder / name)
        for key in tensors:
            rewritten(sound, name, {other: tensor for other, tensor in tensors.items() if other != key})
            found = read(sound)
            assert unchanged(sound, found) or module_of(key) in found, (key, found)


INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def test_a_tensor_of_another_type_is_refused_or_means_the_same(sound):
    """The same bytes under another type of the same width, and the values in another type. A float stays a float."""
    for name in sound.tensor_files():
        sound.write()
        tensors = load_file(sound.folder / name)
        for key, tensor in tensors.items():
            for dtype in (*INTEGERS, *FLOATS):
                if dtype == tensor.dtype or (dtype in FLOATS[:4] and tensor.dtype in FLOATS[:4]):
                    continue
                if key.endswith("weight_scale_inv"):
                    continue  # floats or exponents in bytes: the format has both
                others = [tensor.to(dtype)] if dtype not in FLOATS[4:] or tensor.dtype in FLOATS else []
                if dtype.itemsize == tensor.element_size():
                    others.append(tensor.view(dtype))
                for other in others:
                    rewritten(sound, name, tensors | {key: other})
                    found = read(sound)
                    assert isinstance(found, str) or unchanged(sound, found), (key, tensor.dtype, dtype)


def test_swapped_tensors_are_refused(sound):
    """Any two whose shapes differ, or of which one holds floats and one codes."""
    for name in sound.tensor_files():
        sound.write()
        tensors = load_file(sound.folder / name)
        keys = list(tensors)
        for i, first in enumerate(keys):
            for second in keys[i + 1 :]:
                one, two = tensors[first], tensors[second]
                both_float = one.dtype in FLOATS[:4] and two.dtype in FLOATS[:4]
                if one.shape == two.shape and (one.dtype == two.dtype or both_float):
                    continue
                rewritten(sound, name, tensors | {first: two, second: one})
                found = read(sound)
                assert isinstance(found, str) or unchanged(sound, found), (first, second)


# Formats with a header of their own


def test_changed_bytes_of_a_gguf_header_never_crash(tmp_path):
    """They may be invisible: a block of Q4_0 has 18 bytes, and one of IQ4_NL too."""
    sound = build(gguf_file, tmp_path / "checkpoint")
    data = sound.files["m.gguf"]
    start = data.index(b"blk.0.ffn_down.weight") + 50
    for changed in flips(data, start, 400, seed=7):
        sound.write(**{"m.gguf": changed})
        read(sound)


@pytest.mark.parametrize("number", [0, 1, 3, 6, 7, 10, 14, 24, 30])
def test_a_gguf_tensor_of_another_type_leaves_a_gap(tmp_path, number):
    path = Path(gguf_file(tmp_path).partition(":")[2])
    data = path.read_bytes()
    for name in (b"blk.0.attn_q.weight", b"blk.0.ffn_down.weight"):
        at = data.index(name) + len(name) + 4 + 16
        if struct.unpack_from("<I", data, at)[0] == number:
            continue
        path.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4 :])
        with pytest.raises(YardstickError, match="m.gguf: "):
            open_source(f"gguf:{path}")


def test_the_state_of_bitsandbytes_is_checked(tmp_path):
    four, _ = bnb.quantize((24, 48), "nf4", 64, nested=True)
    name = f"{bnb.LAYER}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(four[name].numpy().tobytes())
    for path in places(state):
        for value in WRONG:
            text = json.dumps(changed_at(state, path, value)).encode()
            spec = bnb.save(tmp_path, four | {name: torch.tensor(list(text), dtype=torch.uint8)})
            sound = Sound("bnb", tmp_path, "", {}, {f"{bnb.LAYER}.weight": torch.zeros(24, 48)})
            assert sound.spec.startswith(spec)
            read(sound)


def test_a_pickle_whose_tensors_are_larger_than_the_file_is_refused(tmp_path):
    """Strides of 0 make a tensor of any size from four bytes."""
    huge = torch.ones(1).expand(1 << 20, 1 << 20)
    spec = hqq.save_pickle(tmp_path, {UP: {"weight": huge}})
    with pytest.raises(YardstickError, match="up_proj.weight has shape .*, more than the file holds"):
        open_source(spec)


# The command line


def damaged_pair(tiny_llama: Path, folder: Path) -> list[tuple[str, Path]]:
    """Specs of damaged checkpoints beside the tiny model, each with the base that it is inspected against."""
    shutil.copytree(tiny_llama, folder / "short")
    path = folder / "short" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    shutil.copytree(tiny_llama, folder / "broken")
    tensors = load_file(folder / "broken" / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(5).int()}, folder / "broken" / "model.safetensors")
    (folder / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    (folder / "new\nline").mkdir()
    shutil.copytree(tiny_llama, folder / "odd")
    (folder / "odd" / "config.json").write_text(json.dumps({"model_type": ["llama"]}))
    shutil.copytree(tiny_llama, folder / "deep")
    config = json.loads((folder / "deep" / "config.json").read_text())
    (folder / "deep" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    wide = tiny_llama
    return [
        (f"hf:{folder / 'short'}", wide),
        (f"hf:{folder / 'broken'}", wide),
        (f"gguf:{folder / 'm.gguf'}", wide),
        (f"hf:{folder / ('new' + chr(10) + 'line')}", wide),
        (f"gptq:{folder / 'broken'}", wide),
        (f"hf:{tiny_llama}", folder / "odd"),
        (f"hf:{tiny_llama}", folder / "deep"),
        (f"hf:{tiny_llama}", folder / "short"),
    ]


def test_inspect_of_a_damaged_checkpoint_is_one_line(tiny_llama, tmp_path, monkeypatch, capsys):
    for spec, base in damaged_pair(tiny_llama, tmp_path):
        arguments = parser("inspect")
        arguments.add_argument("spec")
        arguments.add_argument("--base", type=Path)
        monkeypatch.setattr(sys, "argv", ["inspect", spec, "--base", str(base)])
        with pytest.raises(SystemExit) as stop:
            run_step(inspect_step.main, arguments)
        output = capsys.readouterr()
        lines = output.err.splitlines()
        assert stop.value.code == 1 and len(lines) == 1 and lines[0].startswith("yardstick: "), output.err
        assert not output.out


def test_the_process_itself_ends_with_one_line(tiny_llama, tmp_path):
    spec, base = damaged_pair(tiny_llama, tmp_path)[0]
    command = [sys.executable, "-m", "yardstick.cli.inspect", spec, "--base", str(base)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1 and not result.stdout
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("yardstick: ")
