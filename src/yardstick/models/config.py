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

# a damaged number must not cost hours or gigabytes: every layer has a dozen names
MOST_LAYERS, MOST, LARGEST_NUMBER = 10_000, 2**31, 1e300
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
    family, prefix = str(raw.get("model_type")), "model."
    if family in WRAPPED:
        key, prefix = WRAPPED[family]
        tied = raw.get("tie_word_embeddings")
        raw = raw.get(key)
        if not isinstance(raw, dict):
            raise YardstickError(f"{path}: {key} is not an object")
        raw = raw if tied is None else raw | {"tie_word_embeddings": tied}
        family = str(raw.get("model_type"))
    if family not in FAMILIES:
        raise YardstickError(f"{path}: model_type {family} is not supported (supported: {', '.join(FAMILIES)})")
    hybrid = family == "qwen3_5_text"
    rope = rope_settings(path, raw)
    check_options(path, raw, rope, hybrid)
    reader = _Values(path, raw)
    layers, hidden, heads = (reader.count(k) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    key_heads = reader.count("num_key_value_heads", heads)
    # where the key is left out the families' own defaults differ
    head_dim = reader.count("head_dim", hidden // heads if family in ("llama", "qwen2") else None)
    factor = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25 if hybrid else 1.0))
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise YardstickError(f"{path}: tie_word_embeddings is {tied!r}, not true or false")
    if heads % key_heads:
        raise YardstickError(f"{path}: {heads} attention heads do not share {key_heads} key heads evenly")
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=head_dim,
        vocab_size=reader.count("vocab_size"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope_theta=_Values(path, rope).number("rope_theta"),
        tied_head=tied,
        rotary_dim=int(head_dim * _Values(path, {"partial_rotary_factor": factor}).number("partial_rotary_factor")),
        rope_scaling=llama3_scaling(path, rope) if rope_type(rope) == "llama3" else None,
        layer_kinds=hybrid_layers(path, raw, reader, layers) if hybrid else None,
        delta=delta_shape(path, reader) if hybrid else None,
        prefix=prefix,
        **FAMILIES[family],
    )


class _Values:
    """Numbers of a config by key; anything that is not one is refused, by name."""

    def __init__(self, path: Path, raw: dict) -> None:
        self.path, self.raw = path, raw

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on; `default` where the key is missing or null."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise YardstickError(f"{self.path}: {key} is {value!r}, not a whole number from 1 on")
        most = MOST_LAYERS if key == "num_hidden_layers" else MOST
        if value > most:
            raise YardstickError(f"{self.path}: {key} is {value!r}, which is more than {most}")
        return value

    def number(self, key: str) -> float:
        """A positive finite number."""
        value = self._get(key, None)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST_NUMBER:
            raise YardstickError(f"{self.path}: {key} is {value!r}, not a positive number")
        return float(value)

    def _get(self, key: str, default: int | None):
        value = default if self.raw.get(key) is None else self.raw[key]
        if value is None:
            raise YardstickError(f"{self.path}: key {key!r} is missing")
        return value


def rope_settings(path: Path, raw: dict) -> dict:
    """The rotary settings as one object, `rope_theta` included.

    transformers 5 writes `rope_parameters`; before, theta stood alone and a scaling had `rope_scaling`. A config may
    hold several of them, which must then say the same.

    Raises:
        YardstickError: they differ, or are kept by kind of layer.
    """
    found = [raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)]
    if not all(isinstance(rope, dict) for rope in found):
        raise YardstickError(f"{path}: rope_parameters and rope_scaling must be objects")
    if any(isinstance(value, dict) for rope in found for value in rope.values()):
        raise YardstickError(f"{path}: rotary settings by kind of layer are not supported")
    thetas = [place["rope_theta"] for place in (*found, raw) if place.get("rope_theta") is not None]
    if any(theta != thetas[0] for theta in thetas):
        raise YardstickError(f"{path}: rope_theta is given as {thetas[0]} and as {thetas[-1]}")
    for rope in found:
        if "type" in rope and rope.get("rope_type", rope["type"]) != rope["type"]:
            raise YardstickError(f"{path}: rope_type is {rope['rope_type']} and type is {rope['type']}")
    plain = [
        {k: v for k, v in r.items() if k not in ("rope_theta", "type")} | {"rope_type": rope_type(r)} for r in found
    ]
    if len(plain) == 2 and plain[0] != plain[1]:
        raise YardstickError(f"{path}: rope_parameters and rope_scaling differ; only one can be meant")
    return (found[0] if found else {}) | ({"rope_theta": thetas[0]} if thetas else {})


def check_options(path: Path, raw: dict, rope: dict, hybrid: bool) -> None:
    """Refuse options that the forward does not have.

    Raises:
        YardstickError: names the option, its value and the supported one.
    """
    kinds = raw.get("layer_types") or [ATTENTION]
    if not isinstance(kinds, list):
        raise YardstickError(f"{path}: layer_types is {kinds!r}, not a list")
    others = sorted({str(kind) for kind in kinds} - ({ATTENTION, DELTA} if hybrid else {ATTENTION}))
    unsupported = {
        "layer_types": (others[0] if others else ATTENTION, ATTENTION),
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
    if rope_type(rope) not in ("default", "llama3"):
        raise YardstickError(f"{path}: rope_type = {rope_type(rope)} is not supported (supported: default, llama3)")
    for key, (found, supported) in unsupported.items():
        if found != supported:
            raise YardstickError(f"{path}: {key} = {found} is not supported (supported: {supported})")


def rope_type(rope: dict) -> str:
    """Kind of rotary embedding; older configs call the key `type`."""
    return rope.get("rope_type", rope.get("type", "default"))


def llama3_scaling(path: Path, rope: dict) -> Llama3Scaling:
    """The four numbers of `rope_type: llama3`."""
    values = _Values(path, rope)
    return Llama3Scaling(**{name: values.number(name) for name in Llama3Scaling.__dataclass_fields__})


def hybrid_layers(path: Path, raw: dict, values: _Values, layers: int) -> tuple[str, ...]:
    """Kind of each layer; where the config has no list, every fourth layer is attention.

    Raises:
        YardstickError: the list is not as long as the model.
    """
    interval = values.count("full_attention_interval", 4)
    kinds = tuple(raw.get("layer_types") or [DELTA if (i + 1) % interval else ATTENTION for i in range(layers)])
    if len(kinds) != layers:
        raise YardstickError(f"{path}: layer_types has {len(kinds)} entries for {layers} layers")
    return kinds


def delta_shape(path: Path, values: _Values) -> DeltaShape:
    """Shapes of the delta net in a config.

    Raises:
        YardstickError: the value heads do not share the key heads evenly.
    """
    shape = DeltaShape(
        key_heads=values.count("linear_num_key_heads"),
        value_heads=values.count("linear_num_value_heads"),
        key_dim=values.count("linear_key_head_dim"),
        value_dim=values.count("linear_value_head_dim"),
        kernel=values.count("linear_conv_kernel_dim"),
    )
    if shape.value_heads % shape.key_heads:
        raise YardstickError(f"{path}: {shape.value_heads} value heads do not share {shape.key_heads} key heads evenly")
    return shape
