"""Swaps of single modules against brute force: a whole forward for each, and the KL by its definition in fp64."""

import json

import pytest
import torch

from tests.tiny import write_tiny_model
from tests.unit.test_mixed import edited, gguf, packed, smooth
from yardstick.corpora.load import EvaluationWindows
from yardstick.errors import YardstickError
from yardstick.evaluate.attribution import (
    GROUPS,
    additivity,
    branch_states,
    choose_positions,
    compare_branches,
    describe_branches,
    find_failure,
    find_modules,
    make_branches,
)
from yardstick.evaluate.divergence import Divergence
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states, head_name, head_rows
from yardstick.report.attribution import additivity_line, candidate_section
from yardstick.report.attribution_plot import heat_map, plot_attribution
from yardstick.sources.base import TensorSource

IDS = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(5))
LABELS = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(6))


class Swapped(TensorSource):
    """The original with some tensors of the candidate."""

    def __init__(self, original, candidate, names):
        super().__init__(original.path)
        self.original, self.candidate, self.names = original, candidate, names

    def infos(self):
        return self.original.infos()

    def read(self, name):
        return (self.candidate if name in self.names else self.original).get(name)


def brute_force(original, candidate, branch):
    """Mean KL and top-1 agreement of one branch."""
    names = {name for module in branch.modules for name in module.tensors}
    source, config = Swapped(original.source, candidate, names), original.config
    states = final_hidden_states(source, config, IDS, torch.float32, 3).double()
    reference = final_hidden_states(original.source, config, IDS, torch.float32, 3).double()
    own = candidate if any(module.kind == "head" for module in branch.modules) else original.source
    p, q = (
        (s @ head_rows(h, config)[0:512].double().T).log_softmax(-1)
        for s, h in ((reference, original.source), (states, own))
    )
    kl = (p.exp() * (p - q)).sum(-1)
    return float(kl.mean()), float((p.argmax(-1) == q.argmax(-1)).double().mean())


def attribute(original, candidate, groups=GROUPS):
    modules = find_modules(candidate, original.source, original.config)
    branches = make_branches(modules, groups)
    states, place = branch_states(candidate, original.source, original.config, IDS, branches)
    found = compare_branches(candidate, original.source, original.config, states, place, branches, LABELS, 512)
    return branches, found, states, place


def check(original, candidate):
    """Every branch is what its own forward gives; returns their entries by (group, name)."""
    branches, found, _, _ = attribute(original, candidate)
    entries = list(describe_branches(branches, found, candidate))
    for branch, entry in zip(branches, entries, strict=True):
        kl, top1 = brute_force(original, candidate, branch)
        assert entry["kl"] == pytest.approx(kl, rel=1e-4, abs=1e-8), branch.name  # logits are fp32
        assert entry["top1"] == pytest.approx(top1), branch.name
    return {(entry["group"], entry["name"]): entry for entry in entries}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attribution")
    original = open_folder(write_tiny_model(folder / "model", "llama", tied=True, layers=3))
    return original, packed(original, folder / "rtn")


def test_every_branch_is_its_own_forward_in_a_tied_llama(tied):
    entries = check(*tied)
    # 3 layers of 7 matrices and the head
    assert len([key for key in entries if key[0] == "matrix"]) == 22
    assert [key[1] for key in entries if key[0] == "kind"] == ["q", "k", "v", "o", "gate", "up", "down", "head"]
    assert [key[1] for key in entries if key[0] == "layer"] == ["layer 0", "layer 1", "layer 2"]
    assert [key[1] for key in entries if key[0] == "part"] == ["body", "head", "all"]
    assert min(entry["kl"] for entry in entries.values()) > 0
    one = entries["matrix", "model.layers.1.mlp.down_proj"]
    assert (one["layer"], one["kind"], one["weights"], one["bits"]) == (1, "down", 96 * 160, 96 * 160 * 5)
    layer = 96 * (96 + 32 + 32 + 96) + 3 * 96 * 160
    assert entries["layer", "layer 2"]["weights"] == layer
    assert entries["part", "body"]["weights"] == 3 * layer
    assert entries["part", "all"]["weights"] == 3 * layer + 96 * 512
    assert entries["kind", "head"]["kl"] == entries["part", "head"]["kl"]


def test_every_branch_is_its_own_forward_in_a_hybrid(tmp_path):
    original = open_folder(write_tiny_model(tmp_path / "model", "qwen3_5", tied=False, layers=4))
    entries = check(original, packed(original, tmp_path / "rtn"))
    kinds = [key[1] for key in entries if key[0] == "kind"]
    assert kinds == ["qkv", "z", "out", "gate", "up", "down", "q", "k", "v", "o", "head"]


def test_everything_is_the_candidates_own_forward(tied):
    original, candidate = tied
    branches, _, states, place = attribute(original, candidate, [])
    number = place[[branch.name for branch in branches].index("all")]
    own = torch.nn.functional.normalize(states[number], dim=-1)
    gain = original.source.get("model.norm.weight").float()
    expected = final_hidden_states(candidate, original.config, IDS, torch.float32, 3) / gain
    torch.testing.assert_close(own, torch.nn.functional.normalize(expected, dim=-1), rtol=1e-4, atol=1e-5)


def test_swapping_what_is_the_same_gives_exactly_nothing(tied, tmp_path):
    original = tied[0]
    same = edited(original.folder, tmp_path / "same", lambda tensors: None)
    branches, found, states, place = attribute(original, same)
    assert set(place) == {0} and len(states) == 1
    for branch, divergence in zip(branches, found, strict=True):
        assert float(divergence.kl.abs().max()) == 0.0, branch.name
    entries = list(describe_branches(branches, found, same))
    assert additivity(entries)["all"] == 0 and additivity(entries)["matrix"]["ratio"] is None

    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5

    branches, found, _, _ = attribute(original, edited(original.folder, tmp_path / "one", change))
    changed = {branch.name for branch, d in zip(branches, found, strict=True) if float(d.kl.abs().max()) > 0}
    assert changed == {"body", "all", "up", "layer 1", "model.layers.1.mlp.up_proj"}
    assert len({float(d.kl.mean()) for d in found}) == 2


def test_an_embedding_that_is_the_head_too(tied, tmp_path):
    original = tied[0]
    candidate = gguf(original, tmp_path / "m.gguf")
    assert head_name(candidate, original.config) == "model.embed_tokens.weight"
    entries = check(original, candidate)
    assert [key[1] for key in entries if key[0] == "part"] == ["body", "embedding", "head", "all"]
    weights = {name: entries["part", name]["weights"] for name in ("body", "embedding", "head", "all")}
    assert weights["embedding"] == weights["head"] == 96 * 512
    assert weights["all"] == weights["body"] + 96 * 512  # one tensor, stored once


def test_biases_go_with_their_matrix_and_the_rest_of_a_layer_is_a_module(tmp_path):
    model = write_tiny_model(tmp_path / "qwen2", "qwen2", tied=False)

    def change_bias(tensors):
        tensors["model.layers.1.self_attn.k_proj.bias"] += 3

    original = open_folder(model)
    entries = check(original, edited(model, tmp_path / "bias", change_bias))
    assert entries["matrix", "model.layers.1.self_attn.k_proj"]["kl"] == entries["part", "all"]["kl"] > 0

    hybrid = write_tiny_model(tmp_path / "hybrid", "qwen3_5", tied=False, layers=4)

    def change_gates(tensors):
        tensors["model.layers.2.linear_attn.conv1d.weight"] *= 1.2
        tensors["model.layers.2.linear_attn.A_log"] += 0.5
        tensors["model.norm.weight"] *= 1 + 2.0**-9  # rounded, not smoothed: it goes with the head

    entries = check(open_folder(hybrid), edited(hybrid, tmp_path / "gates", change_gates))
    assert entries["matrix", "model.layers.2.other"]["weights"] > 0
    assert entries["kind", "other"]["kl"] == entries["layer", "layer 2"]["kl"] > 0


def test_a_smoothed_checkpoint_is_refused(tied, tmp_path):
    candidate = edited(tied[0].folder, tmp_path / "smooth", smooth)
    with pytest.raises(YardstickError, match="norm model.layers.1.post_attention_layernorm.weight is not"):
        find_modules(candidate, tied[0].source, tied[0].config)


def windows(counts, length):
    corpora = [name for name, count in counts.items() for _ in range(count)]
    ids = torch.arange(len(corpora))[:, None] * 1000 + torch.arange(length + 1)
    return EvaluationWindows(ids, corpora)


def test_positions_are_the_starts_of_windows_of_each_corpus_in_turn():
    text = windows({"a": 3, "b": 1}, 300)
    inputs, labels, corpora = choose_positions(text, 256)  # 64 a window
    assert inputs.shape == (4, 64) and corpora == ["a", "b", "a", "a"]
    assert inputs[:, 0].tolist() == [0, 3000, 1000, 2000] and torch.equal(labels, inputs + 1)
    assert choose_positions(text, 200)[0][:, 0].tolist() == [0, 3000, 1000]
    inputs, _, corpora = choose_positions(text, 400)  # 100 a window
    assert inputs.shape == (4, 100)
    # 128 at most: the fifth stretch is the second of the first window
    inputs, _, corpora = choose_positions(text, 700)
    assert inputs.shape == (5, 128) and inputs[4].tolist() == list(range(128, 256)) and corpora[4] == "a"
    assert choose_positions(text, 4 * 2 * 128)[0].shape == (8, 128)
    assert choose_positions(windows({"a": 2}, 24), 30)[0].shape == (1, 24)
    for positions in (100, 1152):
        with pytest.raises(YardstickError, match=f"attribution.positions: {positions}: must be"):
            choose_positions(text, positions)


def entry(group, name, kl, layer=None, kind=None):
    where = {"name": name, "group": group, "layer": layer, "kind": kind}
    return where | {"kl": kl, "top1": 0.5, "weights": 2_000_000, "bits": 9_000_000}


ENTRIES = [
    entry("part", "body", 0.3),
    entry("part", "embedding", 0.01, kind="embedding"),
    entry("part", "head", 0.04, kind="head"),
    entry("part", "all", 0.4),
    entry("layer", "layer 0", 0.1, 0),
    entry("layer", "layer 1", 0.25, 1),
    entry("kind", "q", 0.5, kind="q"),
    entry("kind", "head", 0.04, kind="head"),
    entry("matrix", "q0", 0.2, 0, "q"),
    entry("matrix", "q1", 0.08, 1, "q"),
    entry("matrix", "lm_head", 0.04, kind="head"),
]
RECORD = {
    "model": "m",
    "candidate": "c",
    "failed": None,
    "positions": {"rows": 4, "length": 64, "corpora": {"code": 128, "prose": 128}},
    "branches": ENTRIES,
}


def test_sums_beside_the_whole():
    sums = additivity(ENTRIES)
    assert sums["all"] == 0.4
    expected = {"part": (3, 0.35), "kind": (2, 0.54), "layer": (4, 0.4), "matrix": (3, 0.32)}
    for group, (count, total) in expected.items():
        assert sums[group]["count"] == count, group
        assert sums[group]["sum"] == pytest.approx(total) and sums[group]["ratio"] == pytest.approx(total / 0.4)
    assert set(additivity(ENTRIES[:4])) == {"all", "part"}


def test_the_record_says_it_in_words(tmp_path):
    record = RECORD | {"additivity": additivity(ENTRIES)}
    text = "\n".join(candidate_section(record))
    assert "256 positions (4 stretches of 64 tokens: code 128, prose 128)" in text
    assert "the 3 single swaps sum to 0.3200 (0.80 times)" in text
    assert "body, embedding and head sum to 0.3500 (0.87 times)" in text
    # 0.2 of 0.32; 9 bits over 2 weights; 0.2 over two million
    assert "| `q0` | 0.2000 | 62.5% | 0.5000 | 2.00 | 4.50 | 0.1000 |" in text
    assert text.index("`q0`") < text.index("`q1`") < text.index("`lm_head`")
    assert additivity_line(additivity(ENTRIES[:4]), record | {"branches": ENTRIES[:4]}).count("sum to") == 1
    assert candidate_section(record | {"failed": "branch q0: KL is NaN"}) == ["**failed**: branch q0: KL is NaN\n"]
    for number, branches in enumerate((ENTRIES, ENTRIES[:4], [])):
        path = tmp_path / f"{number}.png"
        plot_attribution(record | {"branches": branches, "failed": None if branches else "x"}, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    values = heat_map([e for e in ENTRIES if e["group"] == "matrix"], [0, 1], ["k", "q", "head"])
    assert values[:, 1].tolist() == [0.2, 0.08] and bool((values[:, 0] != values[:, 0]).all())


def test_a_branch_that_is_no_number_is_named(tied, tmp_path):
    original = tied[0]

    def overflow(tensors):
        tensors["model.layers.2.mlp.down_proj.weight"].fill_(3e38)

    branches, found, _, _ = attribute(original, edited(original.folder, tmp_path / "bad", overflow), ["matrix"])
    assert find_failure(branches, found) == "branch body: KL is NaN"
    good = [i for i, branch in enumerate(branches) if branch.name.endswith("2.mlp.up_proj")]
    assert find_failure([branches[i] for i in good], [found[i] for i in good]) is None
    assert isinstance(found[0], Divergence) and json.dumps(find_failure(branches, found))
