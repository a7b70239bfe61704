"""Bytes, operations and tensors at once, from shapes and formats alone."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from yardstick.errors import YardstickError
from yardstick.experiment import NOISE_FLOORS
from yardstick.models.config import DELTA, ModelConfig
from yardstick.quantize.methods import is_folded
from yardstick.quantize.pack import group_count
from yardstick.quantize.trellis import SEQUENCE, SYMBOL_BITS, tile_counts


@dataclass(frozen=True)
class Weights:
    """What a candidate stores of the measured matrices, and what one decoded token reads."""

    name: str
    bits: float
    stored: float
    per_token: float


def parameters(config: ModelConfig) -> int:
    """Parameters of the language model."""
    return sum(prod(shape) for shape in config.tensors().values())


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices that are quantized, output head included, by name."""
    shapes = config.tensors()
    return {name: shapes[name] for name in config.body_matrices()} | {
        "lm_head.weight": (config.vocab_size, config.hidden_size)
    }


def packed_bits(shape: tuple[int, int], group_size: int) -> int:
    """Bits of a matrix in the packing contract: whole bytes of codes a row, a scale and a minimum for each group."""
    rows, columns = shape
    return rows * (8 * -(-columns // 2) + 32 * group_count(columns, group_size))


def trellis_bits(shape: tuple[int, int]) -> int:
    """Bits of a matrix in the trellis format: whole tiles, and a scale for each row."""
    return prod(tile_counts(shape)) * SEQUENCE * SYMBOL_BITS + 16 * shape[0]


def exported_bits(shape: tuple[int, int], group_size: int) -> int:
    """Bits of a matrix in compressed-tensors: words of codes along a row and of zero points along a column, bf16
    scales, and its shape."""
    rows, columns = shape
    groups = group_count(columns, group_size)
    return 32 * rows * -(-columns // 8) + 16 * rows * groups + 32 * groups * -(-rows // 8) + 2 * 64


def variant_bits(config: ModelConfig, recipe: dict, stored=packed_bits) -> dict[str, int]:
    """Stored bits of each quantized matrix of one of our variants, or of its export; kept ones are bf16. Of a mix, and
    what starts from one, what it may take."""
    if "bits" in recipe:
        return {name: int(recipe["bits"] * prod(shape)) for name, shape in matrices(config).items()}
    keep = re.compile(recipe["keep_bf16"]) if recipe["keep_bf16"] else None
    trellis = recipe["method"] == "trellis"

    def bits(shape: tuple[int, int]) -> int:
        return trellis_bits(shape) if trellis else recipe.get("terms", 1) * stored(shape, recipe["group_size"])

    return {
        name: 16 * prod(shape) if keep and keep.search(name) else bits(shape)
        for name, shape in matrices(config).items()
    }


def gguf_bits(config: ModelConfig, recipe: dict, names: Iterable[str]) -> dict[str, int]:
    """Stored bits of tensors of a GGUF rival that we make, by llama.cpp's choice of types."""
    from gguf import GGML_QUANT_SIZES

    from yardstick.rivals.gguf_types import tensor_type
    from yardstick.sources.gguf import ROTARY_PERMUTED, gguf_name

    if config.family not in ROTARY_PERMUTED:
        raise YardstickError(f"a {config.family} model cannot be written as GGUF yet")
    shapes, bits = config.tensors(), {}
    for name in names:
        stored = config.head_name if name == "lm_head.weight" else name
        kind = tensor_type(gguf_name(stored), shapes[stored][1], recipe["mix"], config, recipe["imatrix"])
        block, size = GGML_QUANT_SIZES[kind]
        bits[name] = 8 * prod(shapes[stored]) // block * size
    return bits


def candidate_weights(config: ModelConfig, name: str, recipe: dict) -> Weights | None:
    """Sizes of a candidate that we make, or of the original; None for one that is fetched.

    The recipe of an exported one holds its variant's. Small tensors stay bf16. A token reads every matrix, the small
    tensors and one row of the embedding. An embedding that is not also the head is stored beside it: ours in bf16, in
    GGUF by its own type.
    """
    shapes, measured = config.tensors(), matrices(config)
    plain = {key: 16 * prod(shape) for key, shape in measured.items()}
    embedding = 16 * config.vocab_size * config.hidden_size
    if "method" in recipe or recipe["kind"] == "exported":
        exported = "method" not in recipe
        bits = variant_bits(config, recipe["variant"], exported_bits) if exported else variant_bits(config, recipe)
        own_head = not config.tied_head or is_folded(recipe["variant"] if exported else recipe)
        separate = embedding if own_head or bits["lm_head.weight"] != plain["lm_head.weight"] else 0
    elif recipe["kind"] == "gguf":
        bits = gguf_bits(config, recipe, measured)
        names = [] if config.tied_head else [config.embedding_name]
        separate = sum(gguf_bits(config, recipe, names).values())
    elif recipe["kind"] in ("original", *NOISE_FLOORS):
        bits, separate = plain, 0 if config.tied_head else embedding
    else:
        return None
    rest = sum(prod(shape) for key, shape in shapes.items() if key not in measured and key != config.embedding_name)
    total = sum(bits.values())
    return Weights(
        name=name,
        bits=total / sum(prod(shape) for shape in measured.values()),
        stored=(total + separate) / 8 + 2 * rest,
        per_token=total / 8 + 2 * (rest + config.hidden_size),
    )


def forward_operations(config: ModelConfig, chunks: int, length: int) -> float:
    """Operations of the body on `chunks` chunks: two for each weight and position, and causal attention."""
    positions, total = chunks * length, 0.0
    for layer in range(config.num_layers):
        total += 2 * positions * sum(prod(shape) for shape in config.layer_linears(layer).values())
        if config.layer_kind(layer) == DELTA:
            delta = config.delta  # three products with the state and three inside a chunk of 64
            total += 2 * positions * delta.value_heads * 6 * delta.value_dim * max(delta.key_dim, 64)
        else:
            total += 2 * positions * length * config.num_heads * config.head_dim
    return total


def layer_bytes(config: ModelConfig, width: int) -> int:
    """The largest layer in an arithmetic of `width` bytes."""
    return width * max(
        sum(prod(shape) for shape in config.layer_tensors(layer).values()) for layer in range(config.num_layers)
    )


def activation_bytes(config: ModelConfig, tokens: int, width: int) -> int:
    """Tensors alive inside a block, for the tokens of one batch: the wider of the mixer and the gated product."""
    mixer = 6 * config.num_heads * config.head_dim * width
    if config.delta:
        mixer = max(mixer, (2 * width + 3 * 4) * (2 * config.delta.keys + config.delta.values))
    return tokens * (3 * config.hidden_size * width + max(mixer, 2 * config.intermediate_size * width))


def stages_of(linears: dict[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """The matrices of a layer by the input that they share."""
    groups = [("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("o_proj",), ("out_proj",)]
    groups += [("gate_proj", "up_proj"), ("down_proj",)]
    found = [tuple(name for name in linears if name.rpartition(".")[2] in group) for group in groups]
    return [stage for stage in found if stage]
