"""Weights that another tool spelled out: their values as they lie, their bits as they were stored."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from yardstick.errors import YardstickError
from yardstick.sources import open_source
from yardstick.sources.exl3 import stored_tensors


def test_bits_are_those_of_the_checkpoint_that_was_decoded(tmp_path):
    weights = {"a.weight": torch.randn(16, 32).half(), "n.weight": torch.ones(32).bfloat16()}
    save_file(weights, tmp_path / "model.safetensors")
    assert open_source(f"bf16dir:{tmp_path}").infos()["a.weight"].bits == 16 * 512
    (tmp_path / "stored.json").write_text('{"tensors": {"a.weight": {"scheme": "exl3-3bit", "bits": 2304}}}')
    source = open_source(f"bf16dir:{tmp_path}")
    assert torch.equal(source.get("a.weight"), weights["a.weight"])
    assert source.infos()["a.weight"].scheme == "exl3-3bit" and source.infos()["a.weight"].bits == 2304
    assert source.infos()["n.weight"].bits == 512
    for entry in ({"b.weight": {}}, {"a.weight": {"scheme": "x"}}, {"a.weight": {"scheme": "x", "bits": True}}, [7]):
        (tmp_path / "stored.json").write_text(json.dumps({"tensors": entry}))
        with pytest.raises(YardstickError, match="stored.json: tensor"):
            open_source(f"bf16dir:{tmp_path}")


def test_what_exl3_stores_is_counted_from_its_headers(tmp_path):
    """[128, 256] at 4 and at 2.5 bits: 16 x 16 tiles of 16 K words, channel scales, the marker of a codebook."""
    tensors = {
        "a.trellis": torch.ones(16, 8, 64, dtype=torch.int16),
        "a.suh": torch.ones(256).half(),
        "a.svh": torch.ones(128).half(),
        "a.mcg": torch.tensor(-877912083, dtype=torch.int32),
        "a.bias": torch.ones(128).half(),
        "b.trellis": torch.ones(16, 8, 40, dtype=torch.int16),
        "b.su": torch.ones(16, dtype=torch.int16),
        "b.sv": torch.ones(8, dtype=torch.int16),
        "norm.weight": torch.ones(256).half(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_tensors(tmp_path) == {
        "a.weight": {"scheme": "exl3-4bit", "bits": 4 * 128 * 256 + 16 * 384 + 32},
        "b.weight": {"scheme": "exl3-2.5bit", "bits": int(2.5 * 128 * 256) + 16 * 24},
    }
    save_file(tensors | {"a.trellis": torch.ones(16, 8, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(YardstickError, match="tensor a.trellis of type F32 .* is no EXL3 trellis"):
        stored_tensors(tmp_path)
    save_file({"norm.weight": torch.ones(256)}, tmp_path / "model.safetensors")
    with pytest.raises(YardstickError, match="holds no trellis; is it an EXL3 checkpoint"):
        stored_tensors(tmp_path)


def test_exl3_itself_is_refused_with_what_to_do():
    with pytest.raises(YardstickError, match="source exl3:x: only exllamav3 decodes this, on a GPU; name it"):
        open_source("exl3:x")


class Linear:
    """Stands for exllamav3's LinearEXL3, by the signature of 1.6.5: weights count up from the first channel scale."""

    made = []

    def __init__(self, config, in_features, out_features, scale=None, su=None, sv=None, suh=None, svh=None, **rest):
        assert config is None and scale is None and su is None and sv is None
        assert suh.shape == (in_features,) and svh.shape == (out_features,)
        assert rest.pop("trellis").shape == (in_features // 16, out_features // 16, 64)
        assert rest.pop("mcg").dtype == torch.int32 and rest.pop("out_dtype") == torch.half
        self.made.append(rest.pop("key"))
        assert not rest
        self.weight = torch.arange(in_features * out_features).view(in_features, out_features).half() + suh[0]

    def get_weight_tensor(self):
        return self.weight


@pytest.fixture
def decode(monkeypatch):
    """The script that runs in exllamav3's environment, with stand-ins for the GPU and for exllamav3."""
    place = Path("workflow/envs/exllamav3/decode.py")
    spec = importlib.util.spec_from_file_location("decode", place)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    name = ""
    for part in ("exllamav3", "modules", "quant", "exl3"):
        name = f"{name}.{part}".lstrip(".")
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "LinearEXL3", Linear, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(script, "SHARD_BYTES", 1000)
    return script


def test_every_matrix_goes_through_its_tool_and_the_rest_stays(tmp_path, decode):
    """Two files in, several out; a head of 40 rows that is padded to 48; a bias; a matrix that was not quantized."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()

    def parts(stem, rows, columns, first):
        return {
            f"{stem}.trellis": torch.ones(columns // 16, rows // 16, 64, dtype=torch.int16),
            f"{stem}.suh": torch.full((columns,), float(first)).half(),
            f"{stem}.svh": torch.ones(rows).half(),
            f"{stem}.mcg": torch.tensor(1, dtype=torch.int32),
        }

    plain = {
        "model.embed_tokens.weight": torch.randn(40, 16).half(),
        "model.layers.0.q.bias": torch.randn(32).half(),
        "model.layers.0.a.weight": torch.randn(3, 16).half(),
    }
    save_file(plain | parts("lm_head", 48, 16, 7), tmp_path / "theirs" / "model-1.safetensors")
    save_file(parts("model.layers.0.q", 32, 16, 2), tmp_path / "theirs" / "model-2.safetensors")
    decode.main({}, tmp_path / "theirs", None, tmp_path / "ours")
    source = open_source(f"bf16dir:{tmp_path / 'ours'}")
    assert Linear.made == ["lm_head", "model.layers.0.q"]
    assert set(source.infos()) == {*plain, "lm_head.weight", "model.layers.0.q.weight"}
    for name, tensor in plain.items():
        assert torch.equal(source.get(name), tensor)
    counted = torch.arange(16 * 32).view(16, 32).half() + 2
    assert torch.equal(source.get("model.layers.0.q.weight"), counted.T)
    assert torch.equal(source.get("lm_head.weight"), (torch.arange(16 * 48).view(16, 48).half() + 7).T[:40])
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1


def test_without_a_gpu_it_says_so(tmp_path, decode, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="EXL3 is decoded by CUDA kernels, and there is no GPU here"):
        decode.main({}, tmp_path, None, tmp_path)
