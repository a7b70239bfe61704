"""A model of some shape with random packed weights, for measurements that need no checkpoint."""

from dataclasses import replace

import torch

from yardstick.engine.linear import QuantLinear
from yardstick.engine.measure import copies_beyond_cache
from yardstick.engine.model import JOINED, JoinedLinear
from yardstick.engine.weight import PackedWeight
from yardstick.models.config import ModelConfig
from yardstick.models.generate import Model

STEP_BIAS = -4.0  # of a delta net's step: its memory fades slowly


def random_weight(out_features: int, in_features: int, group_size: int, device: torch.device) -> PackedWeight:
    """Random codes; weights have a mean of about 0 and a variance of about 1 / in, so that states keep their size."""
    groups = -(-in_features // group_size)
    codes = torch.randint(0, 256, (out_features, -(-in_features // 2)), dtype=torch.uint8, device=device)
    step = in_features**-0.5 / 4.6  # 4.6 is the standard deviation of codes from 0 to 15
    scales = (step * (0.5 + torch.rand(out_features, groups, device=device))).bfloat16()
    return PackedWeight(codes, scales, (-7.5 * scales.float()).bfloat16(), in_features, group_size)


def random_weights(out_features: int, in_features: int, group_size: int, device: torch.device) -> list[PackedWeight]:
    """As many random matrices of one shape as no cache holds."""
    first = random_weight(out_features, in_features, group_size, device)
    others = range(copies_beyond_cache(first.nbytes, device) - 1)
    return [first, *(random_weight(out_features, in_features, group_size, device) for _ in others)]


def random_ids(vocabulary: int, count: int) -> list[int]:
    """A prompt, always the same."""
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def random_model(config: ModelConfig, layers: int, group_size: int, dtype: torch.dtype, device: torch.device) -> Model:
    """The first `layers` layers of a model, its embedding and its head."""
    config = replace(config, num_layers=layers, layer_kinds=config.layer_kinds and config.layer_kinds[:layers])
    head = QuantLinear(random_weight(config.vocab_size, config.hidden_size, group_size, device))
    embedding = torch.randn(config.vocab_size, config.hidden_size, device=device).to(dtype)
    gain = torch.zeros(config.hidden_size, device=device) if config.zero_centred_norm else torch.ones_like(embedding[0])
    found = [random_layer(config, layer, group_size, dtype, device) for layer in range(layers)]
    return Model.of_parts(config, found, embedding, gain.to(dtype), head)


def random_layer(
    config: ModelConfig, layer: int, group_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor | torch.nn.Module]:
    """Weights of one layer as `engine.model.load_layer` gives them."""
    linears = config.layer_linears(layer)
    packed = {name: random_weight(*shape, group_size, device) for name, shape in linears.items()}
    found: dict[str, torch.Tensor | torch.nn.Module] = {}
    for name, shape in config.layer_tensors(layer).items():
        if name.removesuffix(".weight") in packed:
            continue
        if "norm" in name:  # gains of 1, some of which are stored less 1
            centred = config.zero_centred_norm and name != "linear_attn.norm.weight"
            found[name] = torch.full(shape, 0.0 if centred else 1.0, device=device, dtype=dtype)
        elif name == "linear_attn.dt_bias":
            found[name] = torch.full(shape, STEP_BIAS, device=device, dtype=dtype)
        else:
            found[name] = (torch.randn(shape, device=device) * shape[-1] ** -0.5).to(dtype)
    for names in JOINED:
        if all(name in packed for name in names):
            found["+".join(names)] = JoinedLinear([packed.pop(name) for name in names])
    return found | {f"{name}.weight": QuantLinear(weight) for name, weight in packed.items()}
