"""Write tiny random Hugging Face models with `transformers`, so that our readers see somebody else's files."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3Config

from yardstick.corpora.arithmetic import word_problems
from yardstick.models.folder import Original
from yardstick.quantize import run_rtn
from yardstick.quantize.checkpoint import INDEX, PackedWriter

VOCABULARY = 512
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_5": Qwen3_5TextConfig}
# n_k != n_v, key and value widths differ, head_dim is not hidden / heads
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_tiny_model(folder: Path, family: str, tied: bool, seed: int = 0, layers: int = 2, **changes) -> Path:
    """A folder that transformers wrote: bf16 weights large enough that quantizing them shows."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "initializer_range": 0.12,
    }
    settings |= (DELTA if family == "qwen3_5" else {}) | changes
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**settings))
    for _, parameter in model.named_parameters():
        if parameter.ndim == 1:  # gains of exactly 1 and biases of 0 would hide a norm or bias that is left out
            parameter.data = (parameter.data + 0.2 * torch.randn_like(parameter)).contiguous()
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of exactly 512 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"],
    )
    tokenizer.train_from_iterator((p.text for p in word_problems(400, seed=9)), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


@torch.no_grad()
def write_rtn_checkpoint(original: Original, folder: Path, group_size: int, keep_bf16=None, terms: int = 1) -> Path:
    """A packed checkpoint, rounded to nearest; returns its index."""
    recipe = {"group_size": group_size, "mse": False, "keep_bf16": keep_bf16, "terms": terms}
    writer = PackedWriter(folder, "d")
    shards = run_rtn.quantize_model(original.source, original.config, recipe, writer, None)
    writer.finish(shards, recipe, original.folder)
    return folder / INDEX
