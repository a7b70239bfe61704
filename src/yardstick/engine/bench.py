"""What a product with a packed matrix costs by each path, and what a step of decoding costs."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from yardstick.engine.choose import choose
from yardstick.engine.measure import peak_memory, synchronize
from yardstick.engine.model import engine_shapes, load_layer, open_head
from yardstick.engine.paths import PATHS
from yardstick.engine.synthetic import random_weights
from yardstick.engine.tune import path_seconds
from yardstick.engine.weight import PackedWeight
from yardstick.evaluate.bits import matrix_bytes
from yardstick.models.config import ModelConfig
from yardstick.models.folder import Original
from yardstick.models.generate import EagerStep, Model, Stepper, Text, generate, greedy
from yardstick.models.prefill import DTYPES, head_name, pick_device
from yardstick.sources.packed import PackedSource


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
    """Shapes (out, in, group size) of the engine's products for a packed checkpoint."""
    size = next(iter(source.schemes.values()))["group_size"]
    return {name: (*shape, size) for name, shape in engine_shapes(config).items()}


def bench_products(
    shapes: dict[str, tuple[int, int, int]], rows: Sequence[int], dtypes: Sequence[str], bandwidth: float
) -> Iterator[Product]:
    """Every path that this device has, for every shape, number of rows and type of inputs."""
    device = pick_device()
    for name, shape in shapes.items():
        weights = random_weights(*shape, device)
        for kind in dtypes:
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
    source: PackedSource, original: Original, vocabulary: int, mode: str, dtype: str, prompt: int, steps: int
) -> dict:
    """Time of a prompt and of the steps after it, one text, greedy, with a checkpoint's weights.

    Args:
        mode: `packed` for the engine's paths, `dense` for dequantized weights.
        prompt: ids of the prompt, random.
        steps: ids that are written after the first.

    Returns:
        milliseconds of the prompt and of a step, the bytes of the matrices that a step reads, and the most memory that
        was taken, in bytes.
    """
    config = original.config
    named = {"load": load_layer, "head": open_head(source, config, vocabulary)} if mode == "packed" else {}
    model = Model(source, config, DTYPES[dtype], vocabulary, **named)
    return {
        "mode": mode,
        "dtype": dtype,
        **decode_times(model, vocabulary, prompt, steps),
        "matrix_bytes": matrix_bytes(source, config) if mode == "packed" else dense_bytes(source, config, dtype),
        "peak_memory": peak_memory(model.device),
    }


def decode_times(model: Model, vocabulary: int, prompt: int, steps: int, stepper: Stepper = EagerStep) -> dict:
    """Milliseconds of a random prompt and, as a median, of a step after it, for one text."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (prompt,), generator=generator).tolist()
    moments: list[float] = []

    def ended(text: Text) -> str | None:
        synchronize(model.device)
        moments.append(time.perf_counter())
        return "whole" if len(text.written) > steps else None

    for _ in range(2):  # the first time paths are made ready
        moments[:] = [time.perf_counter()]
        list(generate(model, [Text(0, ids)], 1, prompt + steps + 2, greedy, ended, stepper=stepper))
    step = statistics.median(after - before for before, after in zip(moments[2:], moments[3:], strict=False))
    return {
        "prompt": prompt,
        "steps": steps,
        "prompt_milliseconds": 1e3 * (moments[1] - moments[0]),
        "step_milliseconds": 1e3 * step,
    }


def dense_bytes(source: PackedSource, config: ModelConfig, dtype: str) -> int:
    """Bytes of the same matrices dequantized; the head is fp32 then."""
    infos = source.infos()
    body = sum(infos[name].numel for name in config.body_matrices())
    return body * DTYPES[dtype].itemsize + 4 * infos[head_name(source, config)].numel
