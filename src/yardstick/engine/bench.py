"""What a product with a packed matrix costs by each path, and what a step of decoding costs."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from yardstick.engine.choose import choose
from yardstick.engine.graphs import stepper_for
from yardstick.engine.measure import peak_memory, synchronize
from yardstick.engine.model import engine_shapes, open_model
from yardstick.engine.paths import PATHS
from yardstick.engine.synthetic import random_weights
from yardstick.engine.tune import path_seconds
from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError
from yardstick.evaluate.bits import matrix_bytes
from yardstick.models.config import ModelConfig
from yardstick.models.folder import Original
from yardstick.models.generate import EagerStep, Model, Stepper, Text, generate, greedy
from yardstick.models.prediction_head import PREFIX, HeadDraft, load_prediction_head
from yardstick.models.prefill import DTYPES, pick_device
from yardstick.models.speculate import Draft, prompt_lookup, speculate
from yardstick.sources.packed import PackedSource

HEAD_NAME, HEAD_DTYPE = "lm_head", "float32"
ROUNDS = 3  # of plain decoding and of drafting, in turn


@dataclass(frozen=True)
class Product:
    """One path's time for one shape.

    `nbytes` is what a call reads and writes: the weight as the path keeps it, inputs and outputs. `share` is nbytes
    over time, as a part of the copy's bandwidth. `chosen` is the path that the dispatcher takes.
    """

    name: str
    out_features: int
    in_features: int
    group_size: int
    rows: int
    dtype: str
    path: str
    microseconds: float
    nbytes: int
    share: float
    chosen: bool


def model_shapes(source: PackedSource, config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Shapes (out, in, group size) of the engine's products for a packed checkpoint.

    Raises:
        YardstickError: it has no packed matrix.
    """
    shapes = engine_shapes(
        config,
        lambda name: source.schemes.get(name, {}).get("group_size"),
        lambda name: source.schemes.get(name, {}).get("terms", 1),
    )
    if not shapes:
        raise YardstickError(f"{source.path}: no matrix is packed; time another variant (engine.candidate)")
    return shapes


def bench_products(
    shapes: dict[str, tuple[int, int, int]], rows: Sequence[int], dtypes: Sequence[str], bandwidth: float
) -> Iterator[Product]:
    """Every path that this device has, for every shape, number of rows and type of inputs; logits are fp32, so a head's
    inputs are too."""
    device = pick_device()
    for name, shape in shapes.items():
        weights = random_weights(*shape, device)
        for kind in [HEAD_DTYPE] if name == HEAD_NAME else dtypes:
            for number in rows:
                x = torch.randn(number, shape[1], device=device).to(DTYPES[kind])
                yield from bench_paths(name, weights, x, bandwidth)


def bench_paths(name: str, weights: list[PackedWeight], x: torch.Tensor, bandwidth: float) -> Iterator[Product]:
    """Every path for one shape and one input."""
    first, device, kind = weights[0], x.device, str(x.dtype).removeprefix("torch.")
    chosen = choose(first, x.dtype, len(x))
    for path, cls in PATHS.items():
        if len(x) not in cls.rows or cls.refusal(first, device):
            continue
        tile = chosen.tile if path == chosen.path else {}
        seconds, read = path_seconds(path, weights, x, tile)
        nbytes = read + x.nbytes + len(x) * first.out_features * x.element_size()
        yield Product(
            name=name,
            out_features=first.out_features,
            in_features=first.in_features,
            group_size=first.group_size,
            rows=len(x),
            dtype=kind,
            path=path,
            microseconds=1e6 * seconds,
            nbytes=nbytes,
            share=nbytes / seconds / bandwidth,
            chosen=path == chosen.path,
        )


def bench_decode(
    source: PackedSource,
    original: Original,
    vocabulary: int,
    mode: str,
    dtype: str,
    ids: Sequence[int],
    steps: int,
    drafted: int,
) -> dict:
    """Time of a prompt and of the steps after it, one text, greedy, with a checkpoint's weights.

    Args:
        mode: `packed` for the engine's paths, `dense` for dequantized weights.
        ids: the prompt.
        steps: ids that are written after the first.
        drafted: ids that are drafted in a step of speculation; 0 for none.

    Returns:
        milliseconds of the prompt and of a step, the bytes of the matrices as they are stored (`matrix_bytes`) and as
        the paths of a step read them (`read_bytes`), the same text drafted and verified, and the most memory in bytes.
    """
    config = original.config
    model = (open_model if mode == "packed" else Model)(source, config, DTYPES[dtype], vocabulary)
    plain = decode_times(model, ids, steps, stepper_for(model.device))
    capacity = len(ids) + steps + drafted + 2
    return {
        "mode": mode,
        "dtype": dtype,
        **plain,
        "matrix_bytes": matrix_bytes(source, config) if mode == "packed" else read_bytes(model),
        "read_bytes": read_bytes(model),
        "peak_memory": peak_memory(model.device),
        "speculation": [
            {"draft": name} | speculation_times(model, ids, plain["written"], draft, drafted, capacity)
            for name, draft in (drafts(original, model, capacity) if drafted else {}).items()
        ],
    }


def drafts(original: Original, model: Model, capacity: int) -> dict[str, Callable[[], Draft]]:
    """Ways to draft by name, each made anew for a text: prompt lookup, and the original's prediction head if it has
    one."""
    found: dict[str, Callable[[], Draft]] = {"prompt lookup": lambda: prompt_lookup}
    if any(name.startswith(PREFIX) for name in original.source.infos()):
        weights = load_prediction_head(original.source, original.config, model.dtype, model.device)
        found["prediction head"] = lambda: HeadDraft(model, weights, capacity)
    return found


class Clock:
    """Says of a text when it has `count` ids, and notes the moment of each."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.moments = [time.perf_counter()]

    def __call__(self, text: Text) -> str | None:
        synchronize(self.device)
        self.moments.append(time.perf_counter())
        return "whole" if len(text.written) >= self.count else None


def decode_times(model: Model, ids: Sequence[int], steps: int, stepper: Stepper = EagerStep) -> dict:
    """Milliseconds of a prompt and, as a median, of a step after it, for one text; and what was written."""
    for _ in range(2):  # the first time paths are made ready
        text, clock = Text(0, list(ids)), Clock(steps + 1, model.device)
        list(generate(model, [text], 1, len(ids) + steps + 2, greedy, clock, stepper=stepper))
    moments = clock.moments
    step = statistics.median(after - before for before, after in zip(moments[2:], moments[3:], strict=False))
    return {
        "prompt": len(ids),
        "steps": steps,
        "prompt_milliseconds": 1e3 * (moments[1] - moments[0]),
        "step_milliseconds": 1e3 * step,
        "written": text.written,
    }


def speculation_times(
    model: Model, ids: Sequence[int], written: list[int], draft: Callable[[], Draft], most: int, capacity: int
) -> dict:
    """The text `written` again, by draft and verify: milliseconds an id, ids drafted and kept, and how many ids are
    those of plain generation before the first other one.

    Plain decoding and drafting take turns; the times are medians of their means over the text, their ratio the median
    of the rounds' ratios. The first round makes paths ready and does not count.
    """
    stepper, times = stepper_for(model.device), []
    for _ in range(ROUNDS + 1):
        plain, clock = Clock(len(written), model.device), Clock(len(written), model.device)
        list(generate(model, [Text(0, list(ids))], 1, capacity, greedy, plain, stepper=stepper))
        text = Text(0, list(ids))
        done = speculate(model, text, capacity, draft(), most, clock)
        times.append([1e3 * (c.moments[-1] - c.moments[1]) / (len(written) - 1) for c in (plain, clock)])
    same = [a == b for a, b in zip(text.written, written, strict=True)]
    return {
        "most": most,
        "milliseconds": statistics.median(drafted for _, drafted in times[1:]),
        "plain_milliseconds": statistics.median(plain for plain, _ in times[1:]),
        "times_plain": statistics.median(plain / drafted for plain, drafted in times[1:]),
        "forwards": done.steps,
        "drafted": done.drafted,
        "accepted": done.accepted,
        "same": same.index(False) if False in same else len(same),
    }


def read_bytes(model: Model) -> int:
    """Bytes of the matrices that a step of one text reads by the paths that it takes; the head works in fp32."""
    total = matrix_nbytes(model.head, torch.float32)
    for weights in model.layers:
        total += sum(matrix_nbytes(weight, model.dtype) for weight in weights.values())
    return total


def matrix_nbytes(weight: torch.Tensor | torch.nn.Module, dtype: torch.dtype) -> int:
    """Bytes that a product of one row reads of a weight; 0 for what is no matrix."""
    if isinstance(weight, torch.Tensor):
        return weight.nbytes if weight.ndim == 2 else 0
    return getattr(weight, "linear", weight).path(1, dtype).nbytes
