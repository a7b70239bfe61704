import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import write_rtn_checkpoint, write_tiny_model
from yardstick.engine.model import load_packed
from yardstick.errors import YardstickError
from yardstick.models.folder import open_folder
from yardstick.models.prefill import final_hidden_states, head_rows
from yardstick.quantize import run_mix
from yardstick.quantize.checkpoint import PackedWriter
from yardstick.quantize.run_mix import choose
from yardstick.sources.packed import PackedSource

HEAD = "lm_head.weight"
COARSE, FINE, KEPT = "rtn-g64", "rtn-g16", "head-bf16"
RECIPES = {
    COARSE: {"group_size": 64},
    FINE: {"group_size": 16},
    KEPT: {"group_size": 64, "keep_bf16": "lm_head"},
}


@pytest.fixture(autouse=True)
def as_a_step_runs():
    """No gradients, as `exact_arithmetic` leaves it."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A model, calibration text in two corpora, and packed checkpoints by name."""
    folder = tmp_path_factory.mktemp("mix")
    original = open_folder(write_tiny_model(folder / "model", "llama", tied=True, num_key_value_heads=3))
    draw = np.random.default_rng(0)
    np.savez(folder / "calib.npz", a=draw.integers(0, 512, (12, 32)), b=draw.integers(0, 512, (8, 32)))
    starts = {name: write_rtn_checkpoint(original, folder / name, **recipe) for name, recipe in RECIPES.items()}
    return original, folder / "calib.npz", starts


def mixed(begun, folder, bits, of=(COARSE, FINE, KEPT)):
    original, calibration, starts = begun
    recipe = {"method": "mix", "of": list(of), "bits": bits, "positions": 256, "held_out": 0.25, "keep_bf16": None}
    writer, paths = PackedWriter(folder, "m"), [starts[name] for name in of]
    shards = run_mix.quantize_model(original.source, original.config, recipe, writer, calibration, paths)
    writer.finish(shards, recipe, paths[0].parent)
    return writer.facts["mix"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def divergence(begun, source, ids):
    original = begun[0]

    def log_probabilities(model):
        states = final_hidden_states(model, original.config, ids, torch.float32, 2)
        return torch.log_softmax((states @ head_rows(model, original.config)[:].float().T).double(), -1)

    wanted = log_probabilities(original.source)
    return float((wanted.exp() * (wanted - log_probabilities(source))).sum(-1).mean())


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_best_of_all_that_fit(seed):
    draw = torch.Generator().manual_seed(seed)
    losses = torch.rand(5, 3, generator=draw, dtype=torch.float64)
    bits = torch.randint(1000, 9000, (5, 3), generator=draw)
    budget = 0.5 * float(bits.min(1).values.sum() + bits.max(1).values.sum())
    rows = torch.arange(5)
    sums = {
        options: float(losses[rows, list(options)].sum())
        for options in itertools.product(range(3), repeat=5)
        if int(bits[rows, list(options)].sum()) <= budget
    }
    chosen = choose(losses, bits, budget)
    assert sums[tuple(chosen)] == pytest.approx(min(sums.values()))


def test_a_mix_keeps_to_its_budget_and_beats_what_fits_whole(begun, tmp_path):
    facts, source = mixed(begun, tmp_path, 5.0), PackedSource(tmp_path)
    assert set(facts["tried"]) == {"mix", COARSE} and facts["written"] == "mix"
    held = {name: tried["held_out"] for name, tried in facts["tried"].items()}
    assert held["mix"] < held[COARSE]
    infos = source.infos()
    names = [*begun[0].config.body_matrices(), HEAD]
    bits = sum(infos[name].bits for name in names) / sum(infos[name].numel for name in names)
    assert bits == pytest.approx(facts["tried"]["mix"]["bits"]) and 4.6 < bits <= 5.0
    assert {entry["variant"] for entry in facts["matrices"].values()} == {COARSE, FINE}
    for name, entry in facts["matrices"].items():
        chosen = PackedSource(begun[2][entry["variant"]].parent)
        assert torch.equal(source.get(name), chosen.get(name)) and infos[name] == chosen.infos()[name]
        assert all(loss > -1e-9 for loss in entry["losses"].values())
    # a head that stays bf16 loses nothing
    assert facts["matrices"][HEAD]["losses"][KEPT] == pytest.approx(0, abs=1e-9)


def test_the_scores_are_divergences_of_the_whole_models(begun, tmp_path):
    facts = mixed(begun, tmp_path, 5.0)
    arrays = np.load(begun[1])
    ids = torch.from_numpy(np.concatenate([arrays["a"][[2, 6, 10]], arrays["b"][[2, 6]]]))
    for folder, name in ((tmp_path, "mix"), (begun[2][COARSE].parent, COARSE)):
        found = divergence(begun, PackedSource(folder), ids)
        assert found == pytest.approx(facts["tried"][name]["held_out"], rel=1e-4)


def test_a_tied_head_that_stays_bf16_is_not_stored(begun, tmp_path):
    """With bits for all of it every matrix is the finer one, and the head is the original's."""
    facts = mixed(begun, tmp_path, 16.0)
    source = PackedSource(tmp_path)
    assert facts["matrices"][HEAD]["variant"] == KEPT and HEAD not in source.infos()
    assert facts["tried"]["mix"]["held_out"] <= min(tried["held_out"] for tried in facts["tried"].values())


def test_a_whole_variant_that_is_better_on_held_out_text_is_written(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(run_mix, "choose", lambda losses, bits, budget: [0] * len(losses))
    facts = mixed(begun, tmp_path, 16.0, of=(COARSE, FINE))
    assert facts["written"] == FINE
    ours, theirs = PackedSource(tmp_path), PackedSource(begun[2][FINE].parent)
    assert all(torch.equal(ours.get(name), theirs.get(name)) for name in theirs.infos())


def test_a_stopped_run_ends_in_the_same_bytes(begun, tmp_path, monkeypatch):
    facts = mixed(begun, tmp_path / "whole", 5.0)
    swap_losses, done = run_mix.swap_losses, []

    def stopping(candidate, *arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(candidate)
        return swap_losses(candidate, *arguments)

    monkeypatch.setattr(run_mix, "swap_losses", stopping)
    with pytest.raises(KeyboardInterrupt):
        mixed(begun, tmp_path / "part", 5.0)
    monkeypatch.setattr(run_mix, "swap_losses", lambda *arguments: done.append(1) or swap_losses(*arguments))
    assert mixed(begun, tmp_path / "part", 5.0) == facts and len(done) == 3
    assert contents(tmp_path / "part") == contents(tmp_path / "whole")


def test_a_budget_below_the_smallest_mix_is_refused(begun, tmp_path):
    with pytest.raises(
        YardstickError, match=r"mix of .*: takes 4\.\d+ bits a weight at least, more than 4; raise bits"
    ):
        mixed(begun, tmp_path, 4.0)


def test_the_engine_runs_groups_of_several_sizes(begun, tmp_path):
    mixed(begun, tmp_path, 5.0)
    original, source = begun[0], PackedSource(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(original.folder, dtype=torch.float32)
    assert set(load_packed(model, source)) == {name.removesuffix(".weight") for name in source.schemes}
    ids = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(5))
    states = final_hidden_states(source, original.config, ids, torch.float32, 2)
    expected = states @ head_rows(source, original.config)[:].T
    assert float((model(ids).logits - expected).norm() / expected.norm()) < 1e-4
