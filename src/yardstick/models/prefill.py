"""One forward for everybody, layer by layer: build a layer from the source, run all chunks through it, free it.

Memory is one layer plus the hidden states of all chunks, and every weight is read once per candidate.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig
from yardstick.models.layers import decode_block, run_block
from yardstick.models.parts import Weights, norm, rotary_table
from yardstick.sources.base import LazyRows, TensorSource

EMBEDDING_ROWS = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def exact_arithmetic() -> None:
    """Ask torch for repeatable fp32 on all cores: no TF32, deterministic kernels where torch has them.

    Snakemake sets OMP_NUM_THREADS to a job's thread count, which is 1 under -j1; one model step runs at a time and
    is given the machine, so the count is set here.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # as use_deterministic_algorithms, which also loads torch's compiler: two seconds a step that no step here needs
    torch.set_deterministic_debug_mode("warn")
    # which also writes NaN into all memory that is taken, to show who reads it before writing: an eighth of the time
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_grad_enabled(False)


def load_layer(
    source: TensorSource, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """All tensors of one layer under their short names, in the compute type."""
    return {
        name: source.get(config.layer_name(layer, name)).to(device=device, dtype=dtype)
        for name in config.layer_tensors(layer)
    }


# reads the tensors of a layer: `load_layer`, or the engine's, which keeps packed matrices packed
Load = Callable[[TensorSource, ModelConfig, int, torch.dtype, torch.device], Weights]


def layers_ahead(
    source: TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device, load: Load = load_layer
) -> Iterator[tuple[int, Weights]]:
    """(number, weights) of each layer in turn; the next one is read on a thread while the caller uses this one."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(load, source, config, 0, dtype, device)
        for layer in range(config.num_layers):
            weights = waiting.result()
            if layer + 1 < config.num_layers:
                waiting = pool.submit(load, source, config, layer + 1, dtype, device)
            yield layer, weights
            del weights  # or three layers would be alive at once


def embed(
    source: TensorSource, config: ModelConfig, input_ids: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Hidden states [chunks, length, hidden] before the first layer. The embedding is read some rows at a time.

    Raises:
        YardstickError: an id is not in the vocabulary.
    """
    ids = input_ids.flatten().long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise YardstickError(f"{source.path}: token ids reach {int(ids.max())}, the vocabulary is {config.vocab_size}")
    table = source.rows(config.embedding_name)
    hidden = torch.empty(len(ids), config.hidden_size, dtype=dtype, device=device)
    for start in range(0, config.vocab_size, EMBEDDING_ROWS):
        chosen = torch.nonzero((ids >= start) & (ids < start + EMBEDDING_ROWS)).squeeze(1)
        if len(chosen):
            rows = table[start : start + EMBEDDING_ROWS][ids[chosen] - start]
            hidden[chosen.to(device)] = rows.to(device=device, dtype=dtype)
    return hidden.view(*input_ids.shape, -1)


def final_hidden_states(
    source: TensorSource,
    config: ModelConfig,
    input_ids: torch.Tensor,
    dtype: torch.dtype,
    batch_chunks: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    decode_from: int | None = None,
    load: Load = load_layer,
) -> torch.Tensor:
    """Final-normed hidden states [chunks, length, hidden] of token ids [chunks, length], in `dtype`.

    `batch_chunks` chunks share a matrix product; it is part of a result's recipe, since the order of additions in a
    product may depend on it. `on_tokens` is told the tokens done, counted once per layer. With `decode_from` the
    positions from there on go one at a time through the caches that generation uses. `load` reads a layer.
    """
    device = pick_device()
    length = input_ids.shape[1]
    hidden = embed(source, config, input_ids, dtype, device)
    rotary = rotary_table(config, length, device, dtype)
    for layer, weights in layers_ahead(source, config, dtype, device, load):
        for start in range(0, len(hidden), batch_chunks):
            batch = slice(start, start + batch_chunks)
            kind = config.layer_kind(layer)
            if decode_from is None:
                hidden[batch] = run_block(hidden[batch], weights, config, kind, rotary)
            else:
                hidden[batch] = decode_block(hidden[batch], weights, config, kind, rotary, decode_from)
            on_tokens(hidden[batch].shape[0] * length)
    gain = source.get(config.final_norm_name).to(device=device, dtype=dtype)
    for start in range(0, len(hidden), batch_chunks):
        batch = slice(start, start + batch_chunks)
        hidden[batch] = norm(hidden[batch], gain, config)
    return hidden


def head_name(source: TensorSource, config: ModelConfig) -> str:
    """Name of a candidate's output head: its own where it brings one, or the embedding that it is tied to."""
    return "lm_head.weight" if "lm_head.weight" in source.infos() else config.head_name


def stored_name(name: str, source: TensorSource, config: ModelConfig) -> str:
    """Name under which a candidate holds a measured matrix: its own, but for a tied head."""
    return head_name(source, config) if name == "lm_head.weight" else name


def head_rows(source: TensorSource, config: ModelConfig) -> torch.Tensor | LazyRows:
    """The candidate's output head [vocab, hidden] as its format defines it, read by rows where the format can."""
    return source.rows(head_name(source, config))


def expected_tensors(config: ModelConfig, source: TensorSource) -> dict[str, tuple[int, ...]]:
    """Tensors that a candidate must hold. A candidate may untie a tied head by bringing its own."""
    expected = config.tensors()
    if config.tied_head and head_name(source, config) != config.head_name:
        expected["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return expected
