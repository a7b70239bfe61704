"""Turn a GGUF release into an ordinary Hugging Face folder that `transformers` loads."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from yardstick.errors import YardstickError
from yardstick.files import write_json
from yardstick.models.config import load_config
from yardstick.retrieve.dither import dither_tensor
from yardstick.sources.gguf import ROTARY_PERMUTED, dequantize_gguf, hf_name, unpermute_rotary
from yardstick.sources.gguf_file import GgufFile

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types of the GGUF tokenizer
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROWS_AT_ONCE = 4096
# two quantized copies of one matrix differ by the rounding of both: 0.044 of its norm for Q5_0 and Q8_0 of Qwen2.5's
MOST_APART = 0.15
# Qwen2's split of a text, as in transformers' Qwen2Tokenizer (Apache-2.0)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def config_from_gguf(file: GgufFile, tied_head: bool = False) -> dict:
    """config.json of a GGUF file of architecture llama or qwen2.

    A file without `output.weight` has a tied head. One with it may have two copies of one matrix, which it does not
    tell; `tied_head` does.

    Raises:
        YardstickError: another architecture, or a key is missing.
    """
    architecture = file.value("general.architecture")
    if architecture not in ("llama", "qwen2"):
        raise YardstickError(
            f"GGUF release: architecture {architecture} cannot be turned into a folder, only llama and qwen2"
        )

    def value(key: str):
        return file.value(f"{architecture}.{key}")

    heads, hidden = int(value("attention.head_count")), int(value("embedding_length"))
    if architecture == "llama":
        head_dim = int(file.value("llama.rope.dimension_count", hidden // heads))
        own = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False, "head_dim": head_dim}
    else:  # its biases of q, k and v are no option
        own = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    # the file holds the epsilon as fp32: 1e-5 reads as 9.999999747378752e-06, of which Hugging Face keeps 1e-05
    epsilon = float(f"{float(value('attention.layer_norm_rms_epsilon')):.6g}")
    return own | {
        "model_type": architecture,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": int(value("feed_forward_length")),
        "num_hidden_layers": int(value("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(value("attention.head_count_kv")),
        "hidden_act": "silu",
        "max_position_embeddings": int(value("context_length")),
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        "tie_word_embeddings": tied_head or HEAD not in file.tensors,
        "vocab_size": len(file.value("tokenizer.ggml.tokens")),
        "bos_token_id": int(file.value("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(file.value("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(file.value("tokenizer.ggml.padding_token_id")),
    }


def tokenizer_from_gguf(file: GgufFile) -> tuple[Tokenizer, dict]:
    """Byte-level BPE tokenizer of a GGUF file, and its tokenizer_config.json.

    Raises:
        YardstickError: another tokenizer kind than the `smollm` or `qwen2` pre-tokenizer on byte-level BPE.
    """
    kind = (file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre"))
    if kind not in (("gpt2", "smollm"), ("gpt2", "qwen2")):
        raise YardstickError(
            f"GGUF release: tokenizer {kind[0]}/{kind[1]} is not supported, only gpt2/smollm and gpt2/qwen2"
        )
    tokens = file.value("tokenizer.ggml.tokens")
    types = [int(of) for of in file.value("tokenizer.ggml.token_type")]
    # unused tokens fill up an embedding that is longer than the vocabulary; they have no text
    vocabulary = {token: i for i, (token, of) in enumerate(zip(tokens, types, strict=True)) if of != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    if kind[1] == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    # one that a user defined is one token too, but it is text: `<tool_call>` stays when special tokens are left out
    for of, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, i in vocabulary.items() if types[i] == of]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])

    def token(role: str, *default: int) -> str | None:
        number = int(file.value(f"tokenizer.ggml.{role}_token_id", *default))
        return tokens[number] if number >= 0 else None

    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown", -1),  # byte-level BPE needs none
        "add_bos_token": bool(file.value("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.value(f"{file.value('general.architecture')}.context_length")),
        "chat_template": file.value("tokenizer.chat_template"),
    }


def require_copies(file: GgufFile) -> None:
    """Refuse a file whose embedding and head are not two copies of one matrix, up to their rounding.

    Raises:
        YardstickError: one is missing, or they are further apart than two types of 4 bits make them.
    """
    if not {EMBEDDING, HEAD} <= set(file.tensors):
        raise YardstickError(f"{file.path}: tied_head is for a file that has both {EMBEDDING} and {HEAD}")
    embedding, head = file.tensors[EMBEDDING], file.tensors[HEAD]
    if embedding.shape != head.shape:
        raise YardstickError(f"{file.path}: {EMBEDDING} and {HEAD} differ in shape, so the head is not tied")
    apart = size = 0.0
    for start in range(0, head.shape[0], ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, head.shape[0])
        values = dequantize_gguf(head.part(start, stop))
        apart += float(np.square(values - dequantize_gguf(embedding.part(start, stop))).sum())
        size += float(np.square(values).sum())
    if not apart <= size * MOST_APART**2:
        raise YardstickError(f"{file.path}: {EMBEDDING} and {HEAD} are not one matrix, so the head is not tied")


def write_release(gguf_path: Path, folder: Path, seed: int | None, tied_head: bool = False) -> None:
    """Write the release as a Hugging Face folder, dithered with `seed` (None: as it is). The folder appears whole.

    With `tied_head` the file's embedding and its head are two quantized copies of one matrix, of which llama.cpp
    gives the head the finer type: it is the one that is drawn, and the coarse copy is left out.

    Raises:
        YardstickError: a tensor of the file is unknown, or one that the config asks for is missing.
    """
    file = GgufFile(gguf_path)
    config = config_from_gguf(file, tied_head)
    heads = {}
    if ROTARY_PERMUTED[config["model_type"]]:
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = {name: hf_name(name) for name in file.tensors}
    if tied_head:
        require_copies(file)
        names[HEAD] = names.pop(EMBEDDING)
    tensors: dict[str, torch.Tensor] = {}
    for of_file, name in names.items():
        if name is None:
            raise YardstickError(f"{gguf_path}: tensor {of_file} has no Hugging Face name")
        values = dither_tensor(file.tensors[of_file], seed)
        module = name.split(".")[-2]
        tensors[name] = unpermute_rotary(values, heads[module]).contiguous() if module in heads else values
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    try:
        write_json(temporary / "config.json", config)
        expected = load_config(temporary).tensors()
        if {name: tuple(value.shape) for name, value in tensors.items()} != expected:
            raise YardstickError(f"{gguf_path}: its tensors are not those of a {config['model_type']} model")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        os.chmod(temporary / "model.safetensors", 0o644)
        tokenizer, tokenizer_config = tokenizer_from_gguf(file)
        tokenizer.save(str(temporary / "tokenizer.json"))
        write_json(temporary / "tokenizer_config.json", tokenizer_config)
        os.chmod(temporary, 0o755)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
