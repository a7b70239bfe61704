"""Turn a GGUF release into an ordinary Hugging Face folder that `transformers` loads."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from yardstick.errors import YardstickError
from yardstick.files import write_json
from yardstick.models.config import load_config
from yardstick.retrieve.dither import dither_tensor
from yardstick.sources.gguf import hf_name, unpermute_rotary
from yardstick.sources.gguf_file import GgufFile

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF tokenizer


def config_from_gguf(file: GgufFile) -> dict:
    """config.json of a llama-architecture GGUF file.

    Raises:
        YardstickError: another architecture, or a key is missing.
    """
    architecture = file.value("general.architecture")
    if architecture != "llama":
        raise YardstickError(f"GGUF release: architecture {architecture} cannot be turned into a folder, only llama")

    def value(key: str):
        return file.value(f"llama.{key}")

    heads, hidden = int(value("attention.head_count")), int(value("embedding_length"))
    # the file holds the epsilon as fp32: 1e-5 reads as 9.999999747378752e-06, of which Hugging Face keeps 1e-05
    epsilon = float(f"{float(value('attention.layer_norm_rms_epsilon')):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": int(value("feed_forward_length")),
        "num_hidden_layers": int(value("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(value("attention.head_count_kv")),
        "head_dim": int(file.value("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(value("context_length")),
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": len(file.value("tokenizer.ggml.tokens")),
        "bos_token_id": int(file.value("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(file.value("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(file.value("tokenizer.ggml.padding_token_id")),
    }


def tokenizer_from_gguf(file: GgufFile) -> tuple[Tokenizer, dict]:
    """Byte-level BPE tokenizer of a GGUF file, and its tokenizer_config.json.

    Raises:
        YardstickError: another tokenizer kind than the `smollm` pre-tokenizer on byte-level BPE.
    """
    kind = (file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise YardstickError(f"GGUF release: tokenizer {kind[0]}/{kind[1]} is not supported, only gpt2/smollm")
    tokens = file.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if int(kind) in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token(role: str) -> str:
        return tokens[int(file.value(f"tokenizer.ggml.{role}_token_id"))]

    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_bos_token": bool(file.value("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.value("llama.context_length")),
        "chat_template": file.value("tokenizer.chat_template"),
    }


def write_release(gguf_path: Path, folder: Path, seed: int | None) -> None:
    """Write the release as a Hugging Face folder, dithered with `seed` (None: as it is). The folder appears whole.

    Raises:
        YardstickError: a tensor of the file is unknown, or one that the config asks for is missing.
    """
    file = GgufFile(gguf_path)
    config = config_from_gguf(file)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in file.tensors.values():
        name = hf_name(tensor.name)
        if name is None:
            raise YardstickError(f"{gguf_path}: tensor {tensor.name} has no Hugging Face name")
        values = dither_tensor(tensor, seed)
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
