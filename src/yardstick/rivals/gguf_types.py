"""Which type llama.cpp gives to which tensor in its named mixes.

The names are recipes, not formats: Q4_K_M gives some matrices six bits, and a width that is not a multiple of 256
falls back to another type altogether. So a row reports the bits that were stored, never the label's.
"""

from dataclasses import dataclass

from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig

SUPER_BLOCK = 256
# what a type becomes where the width is not a multiple of 256
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0, Type.IQ4_XS: Type.IQ4_NL}


@dataclass(frozen=True)
class Mix:
    """Type of most tensors, and llama.cpp's number for the mix."""

    default: Type
    file_type: LlamaFileType


MIXES = {
    "Q8_0": Mix(Type.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": Mix(Type.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "Q4_K_M": Mix(Type.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "IQ4_XS": Mix(Type.IQ4_XS, LlamaFileType.MOSTLY_IQ4_XS),
}


def uses_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice of layers that deserve more bits: the first and last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def tensor_type(name: str, width: int, mix: str, config: ModelConfig, has_imatrix: bool) -> Type:
    """Type of the matrix with GGUF name `name` and `width` input columns, as llama-quantize chooses it.

    Raises:
        YardstickError: the width fits no type of the mix.
    """
    kind = MIXES[mix].default
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "blk" else -1
    role = parts[2] if layer >= 0 else parts[0]
    is_head = role == "output" or (role == "token_embd" and config.tied_head)
    more_bits = role in ("attn_v", "ffn_down") and uses_more_bits(layer, config.num_layers)
    first_down = role == "ffn_down" and layer < config.num_layers // 8
    wide_groups = config.num_heads // config.num_kv_heads >= 4
    if mix != "Q8_0" and (is_head or (mix == "Q4_K_M" and more_bits)):
        kind = Type.Q6_K
    elif mix == "IQ4_XS" and ((role == "attn_v" and wide_groups) or (first_down and not has_imatrix)):
        kind = Type.Q5_K
    elif mix == "Q4_0" and first_down and has_imatrix:
        kind = Type.Q4_1
    if kind in FALLBACK and width % SUPER_BLOCK:
        kind = FALLBACK[kind]
    if width % 32:
        raise YardstickError(
            f"{mix}: tensor {name} has {width} columns, not a multiple of 32; llama.cpp cannot quantize it"
        )
    return kind
