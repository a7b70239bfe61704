"""Weights that another tool spelled out: their values as they lie, their bits as they were stored."""

import json

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
