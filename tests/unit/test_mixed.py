"""A candidate with some of the original's matrices, or with another's head."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import write_tiny_model
from yardstick.cli import evaluate
from yardstick.errors import YardstickError
from yardstick.evaluate.bits import bits_per_weight, schemes, unquantized
from yardstick.evaluate.candidate import open_candidate
from yardstick.files import sha256_file
from yardstick.models.folder import open_folder
from yardstick.models.prefill import expected_tensors, final_hidden_states, head_rows
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.run_rtn import quantize_model
from yardstick.rivals.gguf_write import write_gguf
from yardstick.sources import audit_source, open_source
from yardstick.sources.mixed import MixedSource

RTN = {"group_size": 32, "mse": False, "keep_bf16": None}
DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def packed(original, folder, recipe=RTN):
    writer = PackedWriter(folder, "d")
    writer.finish(quantize_model(original.source, original.config, recipe, writer, None), recipe, original.folder)
    return open_source(f"packed:{folder}", original.config, original.source)


def gguf(original, path):
    write_gguf(path, original, "Q8_0", None, 1)
    return open_source(f"gguf:{path}", original.config, original.source)


def edited(model, folder, edit):
    """The model's folder with some tensors changed."""
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_source(f"hf:{folder}")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A tied original; our int4 of it, which has a head of its own; a GGUF file, whose head is its embedding."""
    folder = tmp_path_factory.mktemp("mixed")
    original = open_folder(write_tiny_model(folder / "model", "llama", tied=True))
    return original, packed(original, folder / "rtn"), gguf(original, folder / "m.gguf")


def mixed(candidate, original, keep=None, head=None):
    source = MixedSource(candidate, original.source, original.config, keep, head)
    audit_source(source, expected_tensors(original.config, source))
    return source


def test_matrices_that_the_pattern_finds_are_the_originals(tied):
    original, candidate, _ = tied
    source = mixed(candidate, original, r"mlp\.down_proj")
    assert torch.equal(source.get(DOWN), original.source.get(DOWN))
    assert not torch.equal(candidate.get(DOWN).float(), original.source.get(DOWN).float())
    for name in (UP, HEAD, EMBEDDING, "model.norm.weight"):
        assert torch.equal(source.get(name), candidate.get(name))
    assert torch.equal(source.rows(HEAD)[100:107], candidate.get(HEAD)[100:107])
    # 2 of 15 measured matrices; one is 96 x 160 at 16 bits
    assert schemes(source, original.config) == {"bf16": 2, "int4-g32": 13}
    assert unquantized(source, original.config) == [DOWN.replace(".1.", ".0."), DOWN]
    plain, whole = bits_per_weight(source, original.config), bits_per_weight(candidate, original.config)
    assert plain["head"] == whole["head"] == 5.0
    # a layer holds 96 x (96 + 32 + 32 + 96) + 3 x 96 x 160 weights, of which 96 x 160 are plain
    assert plain["body"] == pytest.approx(5 + 11 * 96 * 160 / (96 * 256 + 3 * 96 * 160))


def test_the_head_is_kept_under_whichever_name(tied):
    original, own_head, shared_head = tied
    for candidate in (own_head, shared_head):
        source = mixed(candidate, original, "lm_head")
        assert torch.equal(head_rows(source, original.config)[0:512], original.source.get(EMBEDDING))
        assert bits_per_weight(source, original.config)["head"] == 16
        assert torch.equal(source.get(EMBEDDING), candidate.get(EMBEDDING))  # the input embedding stays
        assert torch.equal(source.get(DOWN), candidate.get(DOWN))
    assert not torch.equal(shared_head.get(EMBEDDING), original.source.get(EMBEDDING).float())
    assert bits_per_weight(shared_head, original.config)["head"] == 8.5


def test_the_body_is_kept_and_the_head_measured_alone(tied):
    original, candidate, _ = tied
    source = mixed(candidate, original, r"layers\.")
    ids = torch.randint(0, 512, (2, 9))
    states = [final_hidden_states(s, original.config, ids, torch.float32, 2) for s in (source, original.source)]
    assert torch.equal(*states)
    assert schemes(source, original.config) == {"bf16": 14, "int4-g32": 1}


def test_the_head_of_another_candidate(tied):
    original, ours, theirs = tied
    source = mixed(theirs, original, head=ours)
    assert torch.equal(source.get(HEAD), ours.get(HEAD)) and torch.equal(source.get(EMBEDDING), theirs.get(EMBEDDING))
    bits = bits_per_weight(source, original.config)
    assert (bits["body"], bits["head"]) == (8.5, 5.0)
    turned = mixed(ours, original, head=theirs)  # whose head is its embedding
    assert torch.equal(turned.rows(HEAD)[3:70], theirs.get(EMBEDDING)[3:70])
    assert bits_per_weight(turned, original.config)["head"] == 8.5
    both = mixed(theirs, original, r"layers\.0\.", ours)
    assert torch.equal(both.get(UP), original.source.get(UP)) and torch.equal(both.get(HEAD), ours.get(HEAD))


def test_an_untied_head(tmp_path):
    original = open_folder(write_tiny_model(tmp_path / "model", "qwen2", tied=False))
    candidate = packed(original, tmp_path / "rtn")
    source = mixed(candidate, original, "lm_head|q_proj")
    for name in (HEAD, "model.layers.0.self_attn.q_proj.weight"):
        assert torch.equal(source.get(name), original.source.get(name))
        assert not torch.equal(candidate.get(name).float(), original.source.get(name).float())


def test_biases_stay_the_candidates(tmp_path):
    model = write_tiny_model(tmp_path / "model", "qwen2", tied=False)
    original, bias = open_folder(model), "model.layers.0.self_attn.q_proj.bias"
    candidate = edited(model, tmp_path / "other", lambda tensors: tensors[bias].add_(1))
    source = mixed(candidate, original, "q_proj")
    assert torch.equal(source.get(bias), candidate.get(bias)) and not torch.equal(
        source.get(bias), original.source.get(bias)
    )


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("(", r"keep_bf16: pattern \( cannot be read"),
        ("down_prij", "keep_bf16: 'down_prij' is found in no matrix name, such as model.layers.0.self_attn.q_proj"),
        ("layernorm", "keep_bf16: 'layernorm' is found in no matrix name"),
        ("embed_tokens", "keep_bf16: 'embed_tokens' is found in no matrix name"),
    ],
)
def test_a_pattern_that_finds_nothing(tied, keep, message):
    with pytest.raises(YardstickError, match=message):
        mixed(tied[1], tied[0], keep)


def test_a_head_cannot_be_kept_and_taken(tied):
    original, ours, theirs = tied
    with pytest.raises(YardstickError, match="'proj|lm' finds lm_head.weight too, and the head is to be that of"):
        mixed(theirs, original, "proj|lm", ours)


def smooth(tensors):
    factors = torch.linspace(0.5, 2, 96).bfloat16()
    tensors["model.layers.1.post_attention_layernorm.weight"] /= factors
    for name in ("gate", "up"):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"] *= factors


def test_a_smoothed_checkpoint_is_mixed_with_no_other_matrix(tied, tmp_path):
    original = tied[0]
    candidate = edited(original.folder, tmp_path / "smooth", smooth)
    named = r"smooth: norm model.layers.1.post_attention_layernorm.weight is not the original's \(.* for .*\)"
    for keep in ("down_proj", r"layers\.0\.self_attn\.o_proj"):
        with pytest.raises(YardstickError, match=named) as error:
            mixed(candidate, original, keep)
        assert "\n" not in str(error.value)
    # its last norm is the original's, so heads may be changed
    mixed(candidate, original, "lm_head")
    mixed(tied[1], original, head=candidate)

    def scale_last(tensors):
        tensors["model.norm.weight"] *= 1.25

    last = edited(original.folder, tmp_path / "last", scale_last)
    for arguments in ((last, original, "lm_head"), (tied[1], original, None, last), (last, original, None, tied[1])):
        with pytest.raises(YardstickError, match="last: norm model.norm.weight is not the original's"):
            mixed(*arguments)


def test_norms_that_another_half_precision_type_rounded_are_the_same(tied, tmp_path):
    def to_half(tensors):
        for name, tensor in tensors.items():
            tensors[name] = (tensor.float() * (1 + 2.0**-11)).half()

    source = mixed(edited(tied[0].folder, tmp_path / "half", to_half), tied[0], "down_proj")
    assert source.infos()[UP].scheme == "f16" and source.infos()[DOWN].scheme == "bf16"


def test_a_candidate_is_named_by_a_file_of_it(tied, tmp_path):
    original, ours, theirs = tied
    index = ours.path / "model.safetensors.index.json"
    assert open_candidate("packed", index, original).path == ours.path
    assert open_candidate("gguf", theirs.path, original).infos() == theirs.infos()
    assert open_candidate("hf", None, original) is original.source


def test_options_of_the_evaluation(tied):
    original, ours, theirs = tied
    index = f"packed:{ours.path / 'model.safetensors.index.json'}"
    arguments = SimpleNamespace(checkpoint=theirs.path, keep_bf16="down_proj", head_from=index)
    source, modules, inputs = evaluate.mix(theirs, original, arguments)
    assert torch.equal(source.get(DOWN), original.source.get(DOWN)) and torch.equal(source.get(HEAD), ours.get(HEAD))
    assert modules == ["yardstick.sources.mixed", "yardstick.sources.packed"]
    assert inputs == {"head": sha256_file(ours.path / "model.safetensors.index.json")}
    for changes, message in (
        ({"checkpoint": None}, "--keep-bf16 and --head-from change a candidate; name it with --checkpoint"),
        ({"head_from": "nothing"}, "source nothing:.: must be one of"),
    ):
        with pytest.raises(YardstickError, match=message):
            evaluate.mix(theirs, original, SimpleNamespace(**vars(arguments) | changes))
