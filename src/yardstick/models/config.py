"""The part of a Hugging Face config.json that the forward needs, with the table of supported families."""

from dataclasses import dataclass
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import read_json

# model_type -> what the family adds to the plain block
FAMILIES = {
    "llama": {"qk_norm": False, "qkv_bias": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {"qk_norm": True, "qkv_bias": False},
}


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
    qk_norm: bool
    qkv_bias: bool

    @property
    def head_name(self) -> str:
        """Name of the tensor that the reference uses as its output head."""
        return "model.embed_tokens.weight" if self.tied_head else "lm_head.weight"

    def layer_linears(self) -> dict[str, tuple[int, int]]:
        """Matrices of one layer, short name to [out, in], in the order of the forward."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, self.hidden_size),
            "self_attn.k_proj": (key, self.hidden_size),
            "self_attn.v_proj": (key, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, query),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
        }

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """All tensors of one layer, short name to shape."""
        linears = self.layer_linears()
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
        shapes["input_layernorm.weight"] = (self.hidden_size,)
        shapes["post_attention_layernorm.weight"] = (self.hidden_size,)
        if self.qkv_bias:
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                shapes[f"{name}.bias"] = (linears[name][0],)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, full name to shape; a tied head is not counted twice."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes.update({layer_name(layer, name): shape for name, shape in self.layer_tensors().items()})
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def body_matrices(self) -> list[str]:
        """Full names of the matrices of all layers."""
        return [layer_name(i, f"{name}.weight") for i in range(self.num_layers) for name in self.layer_linears()]


def layer_name(layer: int, name: str) -> str:
    """Full name of a layer's tensor."""
    return f"model.layers.{layer}.{name}"


def load_config(folder: Path) -> ModelConfig:
    """Read config.json.

    Raises:
        YardstickError: the family or one of its options is not supported; nothing is ever assumed silently.
    """
    path = Path(folder) / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise YardstickError(f"{path}: model_type {family} is not supported (supported: {', '.join(FAMILIES)})")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    unsupported = {
        "rope_type": (rope_type, "default"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "mlp_bias": (bool(raw.get("mlp_bias")), False),
        "attention_bias": (bool(raw.get("attention_bias")), False),
        "use_sliding_window": (bool(raw.get("use_sliding_window")), False),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)), 1.0),
    }
    for key, (found, supported) in unsupported.items():
        if found != supported:
            raise YardstickError(f"{path}: {key} = {found} is not supported (supported: {supported})")
    try:
        return ModelConfig(
            family=family,
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab_size=raw["vocab_size"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(theta),
            tied_head=bool(raw.get("tie_word_embeddings", False)),
            **FAMILIES[family],
        )
    except (KeyError, TypeError) as error:
        raise YardstickError(f"{path}: key {error} is missing or has no value") from None
