"""Distil a finished packed checkpoint: its scales and minima learn the original's distribution.

The original's final-normed states of the calibration text are worked out once; its logits are never stored. A part of
the sequences is held out and scored now and then; the best state is what is written, and the start itself if nothing
beats it. All that a step needs to go on is saved at each score.
"""

import math
import sys
from pathlib import Path

import torch

from yardstick.corpora.load import load_arrays, load_calibration
from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig
from yardstick.models.layers import run_block
from yardstick.models.parts import norm, rotary_table
from yardstick.models.prefill import embed, final_hidden_states, head_name, head_rows, pick_device
from yardstick.progress import progress
from yardstick.quantize.checkpoint import PackedWriter, shards_of
from yardstick.quantize.distill import Adam, Matrix, kl_divergence, rate_share
from yardstick.quantize.held_out import split_sequences
from yardstick.quantize.pack import unpack_nibbles
from yardstick.sources.base import TensorSource
from yardstick.sources.packed import PackedSource

HEAD = "lm_head.weight"
TEACHER, TRAINING = "teacher", "training"
TOGETHER = 2  # sequences that share a product where nothing is learned
GRAPH_BYTES = 2 << 30  # what a step may keep for the backward; a larger model's layers are run twice
KEPT_STATES, KEPT_FEATURES = 10, 4  # tensors of hidden and of intermediate size that a layer keeps a position


def graph_bytes(config: ModelConfig, positions: int) -> int:
    """What the forward of so many positions keeps for the backward, about."""
    kept = KEPT_STATES * config.hidden_size + KEPT_FEATURES * config.intermediate_size
    return 4 * positions * kept * config.num_layers


class Student:
    """A packed checkpoint in memory, with all scales and minima of it in two flat tensors."""

    def __init__(self, source: PackedSource, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        packed = {name: source.packed(name) for name in source.schemes}
        self.scales = torch.cat([weight.scales.flatten() for weight in packed.values()]).float().to(device)
        self.minima = torch.cat([weight.minima.flatten() for weight in packed.values()]).float().to(device)
        self.scale_gradients, self.minimum_gradients = torch.zeros_like(self.scales), torch.zeros_like(self.scales)
        self.matrices: dict[str, Matrix] = {}
        groups = 0
        for name, weight in packed.items():
            shape, part = weight.scales.shape, slice(groups, groups := groups + weight.scales.numel())
            codes = unpack_nibbles(weight.codes, weight.in_features).contiguous().to(device)
            flats = (self.scales, self.minima, self.scale_gradients, self.minimum_gradients)
            parts = (flat[part].view(shape) for flat in flats)
            self.matrices[name] = Matrix(codes, *parts, weight.group_size, weight.terms)
        self.layers = []
        for layer in range(config.num_layers):
            names = {short: config.layer_name(layer, short) for short in config.layer_tensors(layer)}
            self.layers.append({s: self.matrices.get(n) or source.get(n).float().to(device) for s, n in names.items()})
        self.gain = source.get(config.final_norm_name).float().to(device)
        self.plain_head = None if HEAD in self.matrices else source.get(head_name(source, config)).float().to(device)

    def stored(self) -> dict[str, torch.Tensor]:
        """A copy of what a checkpoint would hold of all scales and minima, in flat tensors."""
        return {"scales": self.scales.bfloat16(), "minima": self.minima.bfloat16()}

    def parts(self, stored: dict[str, torch.Tensor]) -> dict[str, tuple]:
        """Codes, scales, minima, group size and terms of each matrix by name, with the values of `stored`."""
        found, groups = {}, 0
        for name, matrix in self.matrices.items():
            part = slice(groups, groups := groups + matrix.scales.numel())
            scales, minima = (stored[key][part].view_as(matrix.scales) for key in ("scales", "minima"))
            found[name] = matrix.codes, scales, minima, matrix.group_size, matrix.terms
        return found

    def head(self) -> torch.Tensor:
        """The output head, dense fp32 [vocab, hidden]."""
        return self.matrices[HEAD].dense() if self.plain_head is None else self.plain_head

    def block(self, layer: int, hidden: torch.Tensor, rotary) -> torch.Tensor:
        return run_block(hidden, self.layers[layer], self.config, self.config.layer_kind(layer), rotary)

    def states(self, hidden: torch.Tensor, rotary) -> torch.Tensor:
        """Final-normed states of embedded ids [sequences, length, hidden]."""
        for layer in range(len(self.layers)):
            hidden = self.block(layer, hidden, rotary)
        return norm(hidden, self.gain, self.config)

    def learn(self, hidden: torch.Tensor, rotary, loss_of) -> float:
        """Forward and backward of a batch; `loss_of(states)` gives the loss and its gradient for the states.

        The gradients of all groups are added to the flat tensors. Where the graph of all layers would be too large,
        only each layer's input is kept, and the layer is run again in the backward.
        """
        if graph_bytes(self.config, hidden[..., 0].numel()) <= GRAPH_BYTES:
            with torch.enable_grad():
                states = self.states(hidden.requires_grad_(), rotary)
            loss, gradient = loss_of(states.detach())
            states.backward(gradient)
            return loss
        inputs = []
        for layer in range(len(self.layers)):
            inputs.append(hidden)
            hidden = self.block(layer, hidden, rotary)
        hidden = hidden.requires_grad_()
        with torch.enable_grad():
            states = norm(hidden, self.gain, self.config)
        loss, gradient = loss_of(states.detach())
        states.backward(gradient)
        gradient = hidden.grad
        for layer in reversed(range(len(self.layers))):
            hidden = inputs.pop().requires_grad_()
            with torch.enable_grad():
                output = self.block(layer, hidden, rotary)
            output.backward(gradient)
            gradient = hidden.grad
        return loss


def batch_rows(rows: list[int], size: int, step: int, seed: int) -> list[int]:
    """Rows of a step's batch: each epoch is a new order of all rows, and a batch may reach into the next epoch."""
    found = []
    for place in range(step * size, (step + 1) * size):
        epoch, within = divmod(place, len(rows))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))
        found.append(rows[int(order[within])])
    return found


class Teacher:
    """The original's head, and its final-normed states of all calibration sequences."""

    def __init__(
        self, source: TensorSource, config: ModelConfig, input_ids: torch.Tensor, writer: PackedWriter
    ) -> None:
        self.head = head_rows(source, config)[:].float().to(pick_device())
        kept = writer.load_state(TEACHER)
        if kept:
            self.states = kept[0]["states"].to(pick_device())
            return
        with progress("teacher", input_ids.numel(), passes=config.num_layers) as done:
            self.states = final_hidden_states(source, config, input_ids, torch.float32, TOGETHER, done)
        writer.save_state(TEACHER, {"states": self.states}, {})


class DistillRun:
    """State of one run: what is learned, the scores so far, and the best that was seen."""

    def __init__(self, recipe: dict, student: Student, teacher: Teacher, embedded: torch.Tensor, rotary) -> None:
        self.recipe, self.student, self.teacher = recipe, student, teacher
        self.embedded, self.rotary = embedded, rotary
        self.optimizer = Adam(student.scales, student.minima)
        self.batch = max(1, recipe["batch_tokens"] // embedded.shape[1])
        self.curve: list[dict] = []  # at each score: step, loss of the steps before it, held-out loss
        self.best: dict[str, torch.Tensor] = {}

    def step(self, rows: list[int], share: float) -> float:
        """One step on these sequences, at that share of the full rates; returns the loss before it."""
        student, head = self.student, self.student.matrices.get(HEAD)
        student.scale_gradients.zero_()
        student.minimum_gradients.zero_()

        def loss_of(states: torch.Tensor) -> tuple[float, torch.Tensor]:
            dense = student.head()
            head_gradient = None if head is None else torch.zeros_like(dense)
            wanted, found = self.teacher.states[rows].flatten(0, 1), states.flatten(0, 1)
            loss, gradient = kl_divergence(wanted, self.teacher.head, found, dense, head_gradient)
            if head is not None:
                head.learn(head_gradient)
            return loss, gradient.view_as(states)

        loss = student.learn(self.embedded[rows], self.rotary, loss_of)
        self.optimizer.step(student.scale_gradients, student.minimum_gradients, share * self.recipe["rate"])
        return loss

    def score(self, rows: list[int]) -> float:
        """Mean KL of the sequences that are held out."""
        dense, total = self.student.head(), 0.0
        for first in range(0, len(rows), TOGETHER):
            some = rows[first : first + TOGETHER]
            states = self.student.states(self.embedded[some], self.rotary).flatten(0, 1)
            wanted = self.teacher.states[some].flatten(0, 1)
            total += len(some) * kl_divergence(wanted, self.teacher.head, states, dense, with_gradient=False)[0]
        return total / len(rows)

    def note(self, step: int, loss: float | None, held_out: float) -> None:
        """Take in a score: a better state than all before it is the best.

        Raises:
            YardstickError: it is not a number.
        """
        if not math.isfinite(held_out):
            raise YardstickError(f"distill: the held-out loss is {held_out} after {step} steps; lower the rate")
        if all(held_out < point["held_out"] for point in self.curve):
            self.best = self.student.stored()
        self.curve.append({"step": step, "loss": loss, "held_out": held_out})
        print(f"distil: step {step}, held-out KL {held_out:.4f}", file=sys.stderr)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on, and the best so far."""
        kept = {"scales": self.student.scales, "minima": self.student.minima, "moments": self.optimizer.moments}
        return kept | {f"best.{name}": value for name, value in self.best.items()}

    def restore(self, tensors: dict[str, torch.Tensor], record: dict) -> int:
        """Take up a saved state; returns the steps that it has behind it."""
        self.best = {name: tensors.pop(f"best.{name}") for name in self.student.stored()}
        self.student.scales.copy_(tensors["scales"])
        self.student.minima.copy_(tensors["minima"])
        self.optimizer.moments.copy_(tensors["moments"])
        self.optimizer.done, self.curve = record["steps"], record["curve"]
        return record["steps"]


def quantize_model(
    source: TensorSource,
    config: ModelConfig,
    recipe: dict,
    writer: PackedWriter,
    calibration: Path,
    starts: list[Path],
) -> list[str]:
    """Write all shards of the checkpoint, going on at the last score of a stopped run; returns their names.

    Raises:
        YardstickError: no sequence can be held out, or the loss is not a number.
    """
    started = PackedSource(starts[0].parent)
    shards = shards_of(config, started)
    if all(writer.has_shard(shard) for shard in shards):
        return list(shards)
    run = train(source, config, recipe, writer, calibration, started)
    writer.facts["distillation"] = {"curve": run.curve}
    best = run.student.parts(run.best)
    for shard, names in shards.items():
        for name in names:
            if name in best:
                *parts, terms = best[name]
                writer.add_quantized(name, *parts, terms=terms)
            else:
                writer.add_plain(name, started.get(name))
        writer.finish_shard(shard)
    return list(shards)


def train(
    source: TensorSource, config: ModelConfig, recipe: dict, writer: PackedWriter, calibration: Path, started
) -> DistillRun:
    """Distil the started checkpoint; the returned run holds the best state."""
    device, arrays = pick_device(), load_arrays(calibration)
    learned, held = split_sequences({name: len(rows) for name, rows in arrays.items()}, recipe["held_out"], "distill")
    input_ids = load_calibration(calibration)
    rotary = rotary_table(config, input_ids.shape[1], device, torch.float32)
    embedded = embed(started, config, input_ids, torch.float32, device)
    teacher = Teacher(source, config, input_ids, writer)
    run = DistillRun(recipe, Student(started, config, device), teacher, embedded, rotary)
    kept = writer.load_state(TRAINING)
    done, steps = run.restore(*kept) if kept else 0, recipe["steps"]
    if not kept:
        run.note(0, None, run.score(held))
    losses = []
    with progress("distil", (steps - done) * run.batch * input_ids.shape[1]) as on_tokens:
        for step in range(done, steps):
            losses.append(run.step(batch_rows(learned, run.batch, step, recipe["seed"]), rate_share(step, steps)))
            on_tokens(run.batch * input_ids.shape[1])
            if (step + 1) % recipe["score_every"] == 0 or step + 1 == steps:
                run.note(step + 1, sum(losses) / len(losses), run.score(held))
                losses = []
                writer.save_state(TRAINING, run.tensors(), {"steps": step + 1, "curve": run.curve})
    return run
