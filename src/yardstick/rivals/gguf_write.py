"""Write the reference as a GGUF file, quantized row by row with ggml's own functions (libgguf)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import libgguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, RopeScalingType

from yardstick.errors import YardstickError
from yardstick.files import atomic_path, read_json
from yardstick.models.config import ModelConfig
from yardstick.models.folder import Original
from yardstick.models.parts import rotary_frequencies
from yardstick.rivals.gguf_types import MIXES, tensor_type
from yardstick.sources.gguf import ROTARY_PERMUTED, gguf_name, permute_rotary

ROWS_AT_ONCE = 512
NORMAL, CONTROL = 1, 3  # token types


def quantize_matrix(
    values: np.ndarray, kind: Type, importance: np.ndarray | None, pool: ThreadPoolExecutor
) -> np.ndarray:
    """ggml blocks of fp32 values [out, in]: uint8 [out, bytes]. Rows are independent, so threads share them."""

    def quantize(start: int) -> np.ndarray:
        return libgguf.quantize_rows(values[start : start + ROWS_AT_ONCE], int(kind), importance)

    return np.concatenate(list(pool.map(quantize, range(0, len(values), ROWS_AT_ONCE))))


def write_gguf(
    path: Path,
    original: Original,
    mix: str,
    importance: dict[str, np.ndarray] | None,
    threads: int,
    on_weights: Callable[[int], None] = lambda weights: None,
) -> dict[str, str]:
    """Write all tensors of the model; returns GGUF name to type name.

    Raises:
        YardstickError: a tensor has no GGUF name, or its width fits no type.
    """
    config = original.config
    if config.family not in ROTARY_PERMUTED:
        known = ", ".join(ROTARY_PERMUTED)
        raise YardstickError(f"rival {mix}: a {config.family} model cannot be written as GGUF yet (supported: {known})")
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if ROTARY_PERMUTED[config.family] else {}
    types: dict[str, str] = {}
    with atomic_path(path) as temporary, ThreadPoolExecutor(threads) as pool:
        writer = GGUFWriter(temporary, arch=config.family)
        add_metadata(writer, config, original.folder, mix)
        for name, shape in config.tensors().items():
            tensor = original.source.get(name).float()
            module = name.split(".")[-2]
            if module in heads:
                tensor = permute_rotary(tensor, heads[module])
            values, target = tensor.contiguous().numpy(), gguf_name(name)
            if len(shape) == 1:
                types[target] = "F32"
                writer.add_tensor(target, values)
                continue
            kind = tensor_type(target, shape[1], mix, config, importance is not None)
            types[target] = kind.name
            data = quantize_matrix(values, kind, (importance or {}).get(target), pool)
            writer.add_tensor(target, data, raw_dtype=kind)
            on_weights(values.size)
        if config.rope_scaling:
            plain = rotary_frequencies(replace(config, rope_scaling=None))
            writer.add_tensor("rope_freqs.weight", (plain / rotary_frequencies(config)).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return types


def add_metadata(writer: GGUFWriter, config: ModelConfig, folder: Path, mix: str) -> None:
    """The keys that llama.cpp needs to load and run the file."""
    raw = read_json(folder / "config.json")
    writer.add_file_type(int(MIXES[mix].file_type))
    writer.add_quantization_version(2)
    writer.add_context_length(raw.get("max_position_embeddings", 4096))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, folder, raw)


def add_tokenizer(writer: GGUFWriter, folder: Path, raw: dict) -> None:
    """Tokenizer of the folder where it is one that llama.cpp has a name for; else the file says it has none."""
    tokenizer = read_json(folder / "tokenizer.json", "model")
    steps = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or []
    if [step["type"] for step in steps] != ["Digits", "ByteLevel"] or tokenizer["model"]["type"] != "BPE":
        writer.add_tokenizer_model("none")
        return
    vocabulary: dict[str, int] = dict(tokenizer["model"]["vocab"])
    control = {token["id"] for token in tokenizer.get("added_tokens", []) if token["special"]}
    vocabulary.update({token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])})
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i in control else NORMAL for i in range(len(tokens))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_add_bos_token(False)
    for add, key in (
        (writer.add_bos_token_id, "bos_token_id"),
        (writer.add_eos_token_id, "eos_token_id"),
        (writer.add_pad_token_id, "pad_token_id"),
    ):
        if isinstance(raw.get(key), int):
            add(raw[key])
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and (template := read_json(settings).get("chat_template")):
        writer.add_chat_template(template)
