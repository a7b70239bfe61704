"""Where in the model a candidate's loss comes from: KL from the original when parts of it are the candidate's.

A module is a measured matrix with its bias; the output head; the input embedding, where the candidate's is another; and
what is left of a layer (`other`: convolutions, gates, norms rounded to another type), where anything of it is another.
A branch is a set of modules that are the candidate's while everything else is the original's. All branches go through
the layers in one pass: each layer is read once from both models, and branches that agree in all that they have swapped
so far share their hidden states, so that a branch costs nothing before its first module.

Arithmetic is fp32 whatever the experiment's is: a single matrix moves the output by less than bf16 rounds.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from yardstick.corpora.load import EvaluationWindows
from yardstick.errors import YardstickError
from yardstick.evaluate.divergence import Divergence, compare_many, find_fault
from yardstick.models.config import ModelConfig
from yardstick.models.layers import run_block
from yardstick.models.parts import norm, rotary_table
from yardstick.models.prefill import EMBEDDING_ROWS, embed, head_name, head_rows, layers_ahead, pick_device
from yardstick.sources.base import TensorSource
from yardstick.sources.mixed import HEAD, norm_names, require_same_norms

SHORTEST, LONGEST = 64, 128  # positions of a stretch
BATCH_POSITIONS = 2048  # of branches that share a matrix product
DTYPE = torch.float32
GROUPS = ("kind", "layer", "matrix")
PART = "part"  # the group that is always there: body, head, all


@dataclass(frozen=True)
class Module:
    """A part of the model that is swapped as one: its tensors by full name, `matrix` the one that is measured."""

    name: str
    kind: str
    tensors: tuple[str, ...]
    layer: int | None = None
    matrix: str | None = None


@dataclass(frozen=True)
class Branch:
    """Modules that are the candidate's, under a name; `group` says what the branch is one of."""

    name: str
    group: str
    modules: frozenset[Module]
    layer: int | None = None
    kind: str | None = None


def choose_positions(windows: EvaluationWindows, positions: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Stretches of the evaluation windows: ids and next ids [rows, length], and the corpus of each row.

    The length is positions / windows, but 64 to 128, and no more than a window: with a context of few tokens every
    candidate is far off, and long stretches would be few texts. Stretches are the first `length` tokens of a window of
    each corpus in turn, then of the next window of each; after all windows, the tokens that follow in each of them.

    Raises:
        YardstickError: there is less than one stretch of each corpus, or less text than `positions`.
    """
    count, window = windows.inputs.shape
    length = min(max(positions // count, SHORTEST), LONGEST, window)
    corpora = list(dict.fromkeys(windows.corpora))
    rows = positions // length
    if rows < len(corpora) or rows > count * (window // length):
        most = count * (window // length) * length
        raise YardstickError(
            f"attribution.positions: {positions}: must be {len(corpora) * length} (a stretch of {length} tokens of "
            f"each corpus) to {most} (all windows)"
        )
    rank = [windows.corpora[:i].count(name) for i, name in enumerate(windows.corpora)]  # in its corpus
    order = sorted(range(count), key=lambda i: (rank[i], corpora.index(windows.corpora[i])))
    places = [(i, start) for start in range(0, window - length + 1, length) for i in order][:rows]
    ids = torch.stack([windows.ids[i, start : start + length + 1] for i, start in places])
    return ids[:, :-1], ids[:, 1:], [windows.corpora[i] for i, _ in places]


def find_modules(candidate: TensorSource, original: TensorSource, config: ModelConfig) -> list[Module]:
    """All modules, in the order of the forward.

    Raises:
        YardstickError: a norm of the candidate is not the original's.
    """
    require_same_norms(candidate, original, norm_names(config))
    modules = []
    if not same_rows(candidate, config.embedding_name, original, config.embedding_name):
        modules.append(Module("embedding", "embedding", (config.embedding_name,)))
    for layer in range(config.num_layers):
        names, taken = config.layer_tensors(layer), set()
        for short in config.layer_linears(layer):
            tensors = [name for name in (f"{short}.weight", f"{short}.bias") if name in names]
            taken.update(tensors)
            full = tuple(config.layer_name(layer, name) for name in tensors)
            kind = short.rpartition(".")[2].removesuffix("_proj").removeprefix("in_proj_")
            modules.append(Module(config.layer_name(layer, short), kind, full, layer, full[0]))
        left = [config.layer_name(layer, name) for name in names if name not in taken]
        changed = tuple(n for n in left if not torch.equal(candidate.get(n).to(DTYPE), original.get(n).to(DTYPE)))
        if changed:
            modules.append(Module(config.layer_name(layer, "other"), "other", changed, layer))
    # the last norm is the head's
    modules.append(Module("lm_head", "head", (config.final_norm_name, HEAD), matrix=head_name(candidate, config)))
    return modules


def same_rows(source: TensorSource, name: str, other: TensorSource, other_name: str) -> bool:
    """Whether two matrices hold the same values; read some rows at a time, up to the first that differ."""
    left, right = source.rows(name), other.rows(other_name)
    slices = [slice(start, start + EMBEDDING_ROWS) for start in range(0, len(left), EMBEDDING_ROWS)]
    return len(left) == len(right) and all(torch.equal(left[s].to(DTYPE), right[s].to(DTYPE)) for s in slices)


def make_branches(modules: list[Module], groups: Iterable[str]) -> list[Branch]:
    """Body, head and all (and the embedding, where it is another), and what `groups` asks for: every kind over all
    layers, every layer, every module alone. Head and embedding are no part of the body or of a layer."""
    body = [module for module in modules if module.layer is not None]
    outside = [module for module in modules if module.layer is None]
    branches = [Branch("body", PART, frozenset(body))]
    branches += [Branch(module.kind, PART, frozenset([module]), kind=module.kind) for module in outside]
    branches.append(Branch("all", PART, frozenset(modules)))
    if "kind" in groups:
        kinds = dict.fromkeys(module.kind for module in modules)
        branches += [Branch(k, "kind", frozenset(m for m in modules if m.kind == k), kind=k) for k in kinds]
    if "layer" in groups:
        layers = dict.fromkeys(module.layer for module in body)
        branches += [Branch(f"layer {n}", "layer", frozenset(m for m in body if m.layer == n), layer=n) for n in layers]
    if "matrix" in groups:
        branches += [Branch(m.name, "matrix", frozenset([m]), m.layer, m.kind) for m in modules]
    return branches


def branch_states(
    candidate: TensorSource,
    original: TensorSource,
    config: ModelConfig,
    input_ids: torch.Tensor,
    branches: list[Branch],
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> tuple[dict[int, torch.Tensor], list[int]]:
    """Hidden states after the last layer, fp32 [rows, length, hidden] by number, and the number for each branch.

    Number 0 is the original's. Branches that swap nothing in the body, or nothing that differs, have it too.
    `on_tokens` is told the tokens of each state that goes through a layer.
    """
    device, rows = pick_device(), len(input_ids)
    rotary = rotary_table(config, input_ids.shape[1], device, DTYPE)
    states = {0: embed(original, config, input_ids, DTYPE, device)}
    own_embedding = [any(module.kind == "embedding" for module in branch.modules) for branch in branches]
    if any(own_embedding):
        states[1] = embed(candidate, config, input_ids, DTYPE, device)
    place = [int(own) for own in own_embedding]
    at_once = max(1, BATCH_POSITIONS // input_ids.numel())
    both = [layers_ahead(source, config, DTYPE, device) for source in (original, candidate)]
    for (layer, weights), (_, own_weights) in zip(*both, strict=True):
        changed = {short for short in weights if not torch.equal(weights[short], own_weights[short])}
        steps = [(0, frozenset())]  # the original goes first, and keeps its number
        for branch, start in zip(branches, place, strict=True):
            names = {name for module in branch.modules if module.layer == layer for name in module.tensors}
            steps.append((start, frozenset(short for short in changed if config.layer_name(layer, short) in names)))
        numbers = {step: number for number, step in enumerate(dict.fromkeys(steps))}
        after: dict[int, torch.Tensor] = {}
        for swapped in dict.fromkeys(swapped for _, swapped in numbers):
            mixed = weights | {short: own_weights[short] for short in swapped}
            waiting = [step for step in numbers if step[1] == swapped]
            for batch in (waiting[i : i + at_once] for i in range(0, len(waiting), at_once)):
                inputs = torch.cat([states[start] for start, _ in batch])
                outputs = run_block(inputs, mixed, config, config.layer_kind(layer), rotary)
                after |= {numbers[step]: part for step, part in zip(batch, outputs.split(rows), strict=True)}
                on_tokens(inputs.shape[0] * inputs.shape[1])
        states, place = after, [numbers[step] for step in steps[1:]]
    return states, place


def compare_branches(
    candidate: TensorSource,
    original: TensorSource,
    config: ModelConfig,
    states: dict[int, torch.Tensor],
    place: list[int],
    branches: list[Branch],
    labels: torch.Tensor,
    vocabulary: int,
    on_positions: Callable[[int], None] = lambda positions: None,
) -> list[Divergence]:
    """Divergence of each branch from the original at every position [rows * length].

    A branch without the head runs through the original's last norm and head. One whose states are the original's, and
    whose head is, has a KL of exactly 0.
    """
    gain, own_gain = (s.get(config.final_norm_name).to(pick_device(), DTYPE) for s in (original, candidate))
    same_head = same_rows(candidate, head_name(candidate, config), original, head_name(original, config))
    same_head = same_head and torch.equal(gain, own_gain)
    keys = [
        (number, not same_head and any(module.kind == "head" for module in branch.modules))
        for number, branch in zip(place, branches, strict=True)
    ]
    reference = norm(states[0], gain, config).flatten(0, 1)
    nothing = (0, False)  # compared alone, in products of the reference's shape: its logits are then the same bits
    rest = [key for key in dict.fromkeys(keys) if key != nothing]
    found: dict[tuple[int, bool], Divergence] = {}
    for wanted in ([nothing], [key for key in rest if not key[1]], [key for key in rest if key[1]]):
        if wanted:
            source, last_gain = (candidate, own_gain) if wanted[0][1] else (original, gain)
            outputs = [norm(states[number], last_gain, config).flatten(0, 1) for number, _ in wanted]
            heads = head_rows(original, config), head_rows(source, config)
            args = (reference, heads[0], outputs, heads[1], labels.flatten(), vocabulary, on_positions)
            found |= dict(zip(wanted, compare_many(*args), strict=True))
    return [found[key] for key in keys]


def describe_branches(branches: list[Branch], divergences: list[Divergence], candidate: TensorSource) -> Iterator[dict]:
    """One entry a branch: mean KL (nats), top-1 agreement, weights that are swapped and the bits that they are stored
    in. A tensor that is embedding and head at once counts once."""
    infos = candidate.infos()
    for branch, divergence in zip(branches, divergences, strict=True):
        matrices = {m.matrix or name for m in branch.modules for name in m.tensors if m.matrix or name in infos}
        yield {
            "name": branch.name,
            "group": branch.group,
            "layer": branch.layer,
            "kind": branch.kind,
            "kl": float(divergence.kl.mean()),
            "top1": float((divergence.top1 == divergence.reference_top1).double().mean()),
            "weights": sum(infos[name].numel for name in matrices),
            "bits": sum(infos[name].bits for name in matrices),
        }


def find_failure(branches: list[Branch], divergences: list[Divergence]) -> str | None:
    """The first branch with a KL that cannot be true, with the reason; None where all are."""
    for branch, divergence in zip(branches, divergences, strict=True):
        fault = find_fault(divergence)
        if fault:
            return f"branch {branch.name}: {fault[1]}"
    return None


def additivity(entries: list[dict]) -> dict:
    """Sums of single KLs beside the KL of everything at once, which they would give if losses added up.

    For each group, of all branches that together are the whole once: body, head (and embedding); all kinds; all layers,
    head (and embedding); all modules. `ratio` is sum / KL of `all`, null where that is not above 0.
    """
    parts = [entry for entry in entries if entry["group"] == PART]
    whole = next(entry["kl"] for entry in parts if entry["name"] == "all")
    outside = [entry for entry in parts if entry["name"] not in ("all", "body")]
    sets = {PART: [entry for entry in parts if entry["name"] != "all"]}
    for group in GROUPS:
        members = [entry for entry in entries if entry["group"] == group]
        if members:
            sets[group] = members + (outside if group == "layer" else [])
    return {"all": whole} | {
        group: {
            "count": len(members),
            "sum": (total := sum(entry["kl"] for entry in members)),
            "ratio": total / whole if whole > 0 else None,
        }
        for group, members in sets.items()
    }
