"""The part of a Hugging Face config.json that the forward needs, with the table of supported families."""

from dataclasses import dataclass
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import read_json

# model_type -> what the family adds to the plain block
FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_5_text": {"qk_norm": True, "gated_attention": True, "zero_centred_norm": True},
}
# checkpoints that also hold a vision tower keep the language model's settings one level down, and its tensors too
WRAPPED = {"qwen3_5": ("text_config", "model.language_model.")}

ATTENTION, DELTA = "full_attention", "linear_attention"


@dataclass(frozen=True)
class DeltaShape:
    """Shapes of a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Width of the query part, and of the key part, of the mixed projection."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of its value part."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    tied_head: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    gated_attention: bool = False
    zero_centred_norm: bool = False
    rotary_dim: int | None = None  # of head_dim; None: all of it
    rope_scaling: Llama3Scaling | None = None
    layer_kinds: tuple[str, ...] | None = None  # None: attention everywhere
    delta: DeltaShape | None = None
    prefix: str = "model."

    @property
    def embedding_name(self) -> str:
        """Name of the input embedding."""
        return f"{self.prefix}embed_tokens.weight"

    @property
    def final_norm_name(self) -> str:
        """Name of the last norm's gain."""
        return f"{self.prefix}norm.weight"

    @property
    def head_name(self) -> str:
        """Name of the tensor that the reference uses as its output head."""
        return self.embedding_name if self.tied_head else "lm_head.weight"

    def layer_name(self, layer: int, name: str) -> str:
        """Full name of a layer's tensor."""
        return f"{self.prefix}layers.{layer}.{name}"

    def layer_kind(self, layer: int) -> str:
        """Attention or delta net."""
        return self.layer_kinds[layer] if self.layer_kinds else ATTENTION

    def layer_linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """Matrices of one layer that are quantized, short name to [out, in], in the order of the forward."""
        if self.layer_kind(layer) == DELTA:
            mixer = {
                "linear_attn.in_proj_qkv": (2 * self.delta.keys + self.delta.values, self.hidden_size),
                "linear_attn.in_proj_z": (self.delta.values, self.hidden_size),
                "linear_attn.out_proj": (self.hidden_size, self.delta.values),
            }
        else:
            query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            mixer = {
                "self_attn.q_proj": (2 * query if self.gated_attention else query, self.hidden_size),
                "self_attn.k_proj": (key, self.hidden_size),
                "self_attn.v_proj": (key, self.hidden_size),
                "self_attn.o_proj": (self.hidden_size, query),
            }
        return mixer | {
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
        }

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """All tensors of one layer, short name to shape."""
        linears = self.layer_linears(layer)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
        shapes["input_layernorm.weight"] = (self.hidden_size,)
        shapes["post_attention_layernorm.weight"] = (self.hidden_size,)
        if self.layer_kind(layer) == DELTA:
            delta = self.delta
            shapes |= {
                "linear_attn.in_proj_a.weight": (delta.value_heads, self.hidden_size),
                "linear_attn.in_proj_b.weight": (delta.value_heads, self.hidden_size),
                "linear_attn.conv1d.weight": (2 * delta.keys + delta.values, 1, delta.kernel),
                "linear_attn.A_log": (delta.value_heads,),
                "linear_attn.dt_bias": (delta.value_heads,),
                "linear_attn.norm.weight": (delta.value_dim,),
            }
            return shapes
        if self.qkv_bias:
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                shapes[f"{name}.bias"] = (linears[name][0],)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, full name to shape; a tied head is not counted twice."""
        shapes: dict[str, tuple[int, ...]] = {self.embedding_name: (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes.update({self.layer_name(layer, name): shape for name, shape in self.layer_tensors(layer).items()})
        shapes[self.final_norm_name] = (self.hidden_size,)
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def body_matrices(self) -> list[str]:
        """Full names of the matrices of all layers that are quantized."""
        return [
            self.layer_name(layer, f"{name}.weight")
            for layer in range(self.num_layers)
            for name in self.layer_linears(layer)
        ]


def load_config(folder: Path) -> ModelConfig:
    """Read the config.json of a model folder; see `read_config`."""
    return read_config(Path(folder) / "config.json")


def read_config(path: Path) -> ModelConfig:
    """Read a config.json, wherever it lies.

    Raises:
        YardstickError: the family or one of its options is not supported; nothing is ever assumed silently.
    """
    raw = read_json(path)
    family, prefix = raw.get("model_type"), "model."
    if family in WRAPPED:
        key, prefix = WRAPPED[family]
        tied = raw.get("tie_word_embeddings")
        raw = raw.get(key) or {}
        raw = raw if tied is None else raw | {"tie_word_embeddings": tied}
        family = raw.get("model_type")
    if family not in FAMILIES:
        raise YardstickError(f"{path}: model_type {family} is not supported (supported: {', '.join(FAMILIES)})")
    # transformers 5 writes one object; before, theta stood alone and the scaling had its own
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    hybrid = family == "qwen3_5_text"
    check_options(path, raw, rope, hybrid)
    try:
        head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        factor = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25 if hybrid else 1.0))
        return ModelConfig(
            family=family,
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=int(raw["num_attention_heads"]),
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=head_dim,
            vocab_size=int(raw["vocab_size"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else raw["rope_theta"]),
            tied_head=bool(raw.get("tie_word_embeddings", False)),
            rotary_dim=int(head_dim * factor),
            rope_scaling=llama3_scaling(rope) if rope_type(rope) == "llama3" else None,
            layer_kinds=hybrid_layers(raw) if hybrid else None,
            delta=delta_shape(raw) if hybrid else None,
            prefix=prefix,
            **FAMILIES[family],
        )
    except KeyError as error:
        raise YardstickError(f"{path}: key {error} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise YardstickError(f"{path}: a value is missing or not of its kind ({error})") from None


def check_options(path: Path, raw: dict, rope: dict, hybrid: bool) -> None:
    """Refuse options that the forward does not have.

    Raises:
        YardstickError: names the option, its value and the supported one.
    """
    scaling = raw.get("rope_scaling") or rope
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise YardstickError(f"{path}: rope_parameters and rope_scaling must be objects")
    plain_layers = hybrid or set(raw.get("layer_types") or [ATTENTION]) == {ATTENTION}
    unsupported = {
        "rope_scaling": (rope_type(scaling), rope_type(rope)),  # where a config holds both
        "rope_type": (rope_type(rope), "llama3" if rope_type(rope) == "llama3" else "default"),
        "layer_types": ("full_attention everywhere" if plain_layers else "mixed", "full_attention everywhere"),
        "no_rope_layers": (raw.get("no_rope_layers") or None, None),
        "quantization_config": (bool(raw.get("quantization_config")), False),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "mlp_bias": (bool(raw.get("mlp_bias")), False),
        "attention_bias": (bool(raw.get("attention_bias")), False),
        "use_sliding_window": (bool(raw.get("use_sliding_window")), False),
    }
    if not hybrid:
        factor = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        unsupported["partial_rotary_factor"] = (factor, 1.0)
    for key, (found, supported) in unsupported.items():
        if found != supported:
            raise YardstickError(f"{path}: {key} = {found} is not supported (supported: {supported})")


def rope_type(rope: dict) -> str:
    """Kind of rotary embedding; older configs call the key `type`."""
    return rope.get("rope_type", rope.get("type", "default"))


def llama3_scaling(rope: dict) -> Llama3Scaling:
    """The four numbers of `rope_type: llama3`."""
    return Llama3Scaling(**{name: rope[name] for name in Llama3Scaling.__dataclass_fields__})


def hybrid_layers(raw: dict) -> tuple[str, ...]:
    """Kind of each layer; where the config has no list, every fourth layer is attention."""
    interval = raw.get("full_attention_interval", 4)
    default = [DELTA if (i + 1) % interval else ATTENTION for i in range(raw["num_hidden_layers"])]
    return tuple(raw.get("layer_types") or default)


def delta_shape(raw: dict) -> DeltaShape:
    """Shapes of the delta net in a config."""
    return DeltaShape(
        key_heads=raw["linear_num_key_heads"],
        value_heads=raw["linear_num_value_heads"],
        key_dim=raw["linear_key_head_dim"],
        value_dim=raw["linear_value_head_dim"],
        kernel=raw["linear_conv_kernel_dim"],
    )
