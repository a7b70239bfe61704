"""Mix finished packed checkpoints: for each matrix the variant that makes the best use of a budget of bits.

Each matrix alone is swapped into the original from every variant, and its KL on calibration text is measured. Losses of
single matrices nearly add up, so the mix of least sum within the budget is a multiple-choice knapsack, solved exactly.
It is a prediction all the same: the mix and every whole variant within the budget are measured on sequences that were
held out, and the best of them is what is written.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from yardstick.corpora.load import load_arrays, load_calibration
from yardstick.errors import YardstickError
from yardstick.evaluate.attribution import branch_states, compare_branches, find_modules, make_branches
from yardstick.evaluate.divergence import compare
from yardstick.models.config import ModelConfig
from yardstick.models.prefill import final_hidden_states, head_rows, stored_name
from yardstick.progress import progress
from yardstick.quantize.checkpoint import PackedWriter, shards_of
from yardstick.quantize.held_out import split_sequences
from yardstick.sources.base import TensorInfo, TensorSource
from yardstick.sources.mixed import HEAD, ReplacedSource
from yardstick.sources.packed import CODES, MINIMA, SCALES, PackedSource

STRETCH = 128  # tokens of a piece of text on which single matrices are measured
TOGETHER = 2  # sequences that share a product
SLACK = 1e-6  # share of the budget that is left, since the solver may overstep by 1e-7 of it


def choose(losses: torch.Tensor, bits: torch.Tensor, budget: float) -> list[int]:
    """For each matrix the option that it gets: the least sum of losses with at most `budget` bits in all.

    Args:
        losses, bits: of each option of each matrix, [matrices, options].

    Raises:
        YardstickError: there is none, or the solver gives up.
    """
    matrices, options = losses.shape
    one_each = np.kron(np.eye(matrices), np.ones(options))
    unit = float(bits.max())  # numbers near 1, for the solver
    found = milp(
        losses.double().flatten().numpy() / max(float(losses.abs().max()), 1e-30),
        integrality=np.ones(matrices * options),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(bits.double().flatten().numpy() / unit, ub=budget / unit * (1 - SLACK)),
        ],
        options={"mip_rel_gap": 0},
    )
    if found.x is None:
        raise YardstickError(f"mix: nothing was found: {found.message}")
    return found.x.reshape(matrices, options).argmax(1).tolist()


def swap_losses(
    candidate: TensorSource, source: TensorSource, config: ModelConfig, input_ids: torch.Tensor, on_tokens
) -> dict[str, float]:
    """Mean KL of the original with one matrix of the candidate's, for each matrix.

    Raises:
        YardstickError: something beside its matrices is not the original's.
    """
    modules = find_modules(candidate, source, config)
    other = next((module for module in modules if not module.matrix), None)
    if other:
        raise YardstickError(f"{candidate.path}: {other.name} is not the original's; its matrices cannot be mixed")
    branches = [branch for branch in make_branches(modules, ("matrix",)) if branch.group == "matrix"]
    states, place = branch_states(candidate, source, config, input_ids, branches, on_tokens)
    # the ids stand in for labels: no figure of theirs is used
    found = compare_branches(candidate, source, config, states, place, branches, input_ids, config.vocab_size)
    names = [HEAD if module.kind == "head" else module.matrix for module in modules]
    return {name: float(divergence.kl.mean()) for name, divergence in zip(names, found, strict=True)}


class MixRun:
    """The original, the checkpoints to choose from and the text that decides."""

    def __init__(
        self, recipe: dict, source: TensorSource, config: ModelConfig, starts: list[Path], calibration: Path
    ) -> None:
        self.recipe, self.source, self.config = recipe, source, config
        self.options = {name: PackedSource(p.parent) for name, p in zip(recipe["of"], starts, strict=True)}
        ids = load_calibration(calibration)
        counts = {name: len(rows) for name, rows in load_arrays(calibration).items()}
        learned, held = split_sequences(counts, recipe["held_out"], "mix")
        self.held_ids = ids[held]
        length = min(STRETCH, ids.shape[1])
        pieces = ids[learned, : ids.shape[1] // length * length].reshape(-1, length)
        count = min(max(1, recipe["positions"] // length), len(pieces))
        self.pieces = pieces[[(2 * i + 1) * len(pieces) // (2 * count) for i in range(count)]]
        self.names = [*config.body_matrices(), HEAD]

    def losses(self, writer: PackedWriter) -> torch.Tensor:
        """KL of every matrix of every variant alone, fp64 [matrices, options]; those of a stopped run are read."""
        columns = []
        work = self.pieces.numel() * len(self.options)
        with progress("mix", work, passes=self.config.num_layers * len(self.names) // 2) as done:
            for number, candidate in enumerate(self.options.values()):
                kept = writer.load_state(f"losses-{number}")
                if not kept:
                    found = swap_losses(candidate, self.source, self.config, self.pieces, done)
                    kept = {"losses": torch.tensor([found[name] for name in self.names], dtype=torch.float64)}, {}
                    writer.save_state(f"losses-{number}", *kept)
                columns.append(kept[0]["losses"])
        return torch.stack(columns, 1)

    def bits(self) -> torch.Tensor:
        """Stored bits of every matrix of every variant, int64 [matrices, options]."""
        sources = self.options.values()
        return torch.tensor([[self.info(name, source).bits for source in sources] for name in self.names])

    def weights(self) -> int:
        """Weights of all matrices."""
        return sum(self.info(name, self.source).numel for name in self.names)

    def info(self, name: str, source: TensorSource) -> TensorInfo:
        """How a source stores a matrix."""
        return source.infos()[stored_name(name, source, self.config)]

    def model(self, chosen: list[int]) -> ReplacedSource:
        """The model with option `chosen[i]` for matrix i; whatever is no matrix comes from the first option."""
        sources = list(self.options.values())
        matrices = {name: sources[option] for name, option in zip(self.names, chosen, strict=True)}
        replaced = {name: (source, stored_name(name, source, self.config)) for name, source in matrices.items()}
        return ReplacedSource(sources[0], replaced)

    def held_out(self, chosen: list[int], teacher: torch.Tensor) -> float:
        """Mean KL of such a model on the sequences held out."""
        model = self.model(chosen)
        states = final_hidden_states(model, self.config, self.held_ids, torch.float32, TOGETHER)
        heads = head_rows(self.source, self.config), model.rows(HEAD)
        return float(
            compare(
                teacher.flatten(0, 1),
                heads[0],
                states.flatten(0, 1),
                heads[1],
                self.held_ids.flatten(),  # no figure of labels is used
                self.config.vocab_size,
            ).kl.mean()
        )


def quantize_model(
    source: TensorSource,
    config: ModelConfig,
    recipe: dict,
    writer: PackedWriter,
    calibration: Path,
    starts: list[Path],
) -> list[str]:
    """Write all shards of the checkpoint; returns their names.

    Raises:
        YardstickError: the budget is too small, no sequence can be held out, or the variants cannot be mixed.
    """
    run = MixRun(recipe, source, config, starts, calibration)
    sources = list(run.options.values())
    shards = shards_of(config, run.model([0] * len(run.names)))
    if all(writer.has_shard(shard) for shard in shards):
        return list(shards)
    option_of = dict(zip(run.names, allocate(run, writer), strict=True))
    for shard, names in shards.items():
        for name in names:
            candidate = sources[option_of.get(name, 0)]
            if name in candidate.schemes:
                stored = candidate.packed(name)
                parts = {CODES: stored.codes, SCALES: stored.scales, MINIMA: stored.minima}
                writer.add_encoded(name, parts, candidate.schemes[name])
            elif name in candidate.infos():  # a tied head that stays bf16 is not stored
                writer.add_plain(name, candidate.get(name))
        writer.finish_shard(shard)
    return list(shards)


def allocate(run: MixRun, writer: PackedWriter) -> list[int]:
    """The option of each matrix; what it was chosen by goes into the record."""
    losses, bits, weights = run.losses(writer), run.bits(), run.weights()
    budget, names = run.recipe["bits"] * weights, list(run.options)
    least = int(bits.min(1).values.sum())
    if least > budget:
        raise YardstickError(
            f"mix of {', '.join(names)}: takes {least / weights:.3f} bits a weight at least, more than"
            f" {run.recipe['bits']:g}; raise bits"
        )
    tried = {"mix": choose(losses, bits, budget)}
    tried |= {
        name: [number] * len(run.names) for number, name in enumerate(names) if int(bits[:, number].sum()) <= budget
    }
    teacher = final_hidden_states(run.source, run.config, run.held_ids, torch.float32, TOGETHER)
    rows, report = torch.arange(len(run.names)), {}
    for name, options in tried.items():
        size, held_out = int(bits[rows, options].sum()) / weights, run.held_out(options, teacher)
        report[name] = {"bits": size, "sum_of_losses": float(losses[rows, options].sum()), "held_out": held_out}
        print(f"mix: {name}: {size:.3f} bits a weight, held-out KL {held_out:.4f}", file=sys.stderr)
    best = min(report, key=lambda name: report[name]["held_out"])
    matrices = {
        name: {"variant": names[option], "losses": dict(zip(names, row, strict=True))}
        for name, option, row in zip(run.names, tried[best], losses.tolist(), strict=True)
    }
    writer.facts["mix"] = {"written": best, "tried": report, "matrices": matrices}
    return tried[best]
