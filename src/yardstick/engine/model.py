"""Models whose matrices stay packed: transformers' own, changed in place, and layers of our forward."""

import re
from collections.abc import Sequence

import torch

from yardstick.engine.linear import QuantLinear
from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError
from yardstick.models.attention import QKV
from yardstick.models.config import ModelConfig
from yardstick.models.layers import GATE_UP
from yardstick.models.prefill import head_name, pick_device
from yardstick.quantize.grid import Grid, round_to_nearest
from yardstick.sources.base import TensorSource
from yardstick.sources.packed import PackedSource

# matrices that share their input, and are one matrix in the engine: one pass over the input, one kernel to start
JOINED = (QKV, GATE_UP)
GROUP_SIZE, MSE = "group_size", "mse"
HEAD = "lm_head.weight"


def quantize_model(model: torch.nn.Module, recipe: dict, skip: str | None = None, path: str | None = None) -> list[str]:
    """Replace the linear layers of a transformers model by packed ones, rounded to nearest, in place.

    Args:
        recipe: `group_size`, and `mse` for the search of ranges; methods that need text are `load_packed`'s.
        skip: regular expression; layers whose name it finds stay as they are.
        path: of `QuantLinear`.

    Returns:
        Names of the layers that were replaced.

    Raises:
        YardstickError: the recipe is not of rounding to nearest, or nothing is left to replace.
    """
    unknown = set(recipe) - {"method", GROUP_SIZE, MSE}
    if recipe.get("method", "rtn") != "rtn" or unknown or GROUP_SIZE not in recipe:
        raise YardstickError("quantize_model rounds to nearest: its recipe has a group_size, and mse or not")
    grid = Grid(recipe[GROUP_SIZE], recipe.get(MSE, False))

    def packed(name: str, layer: torch.nn.Linear) -> PackedWeight:
        return PackedWeight.pack(*round_to_nearest(layer.weight.detach().float(), grid), grid.group_size)

    return replace_linears(model, packed, skip, path)


def load_packed(model: torch.nn.Module, source: PackedSource, path: str | None = None) -> list[str]:
    """Replace the linear layers of a transformers model that a packed checkpoint holds packed, in place.

    What it holds as plain tensors (norms, embedding, a head that is kept) takes the place of the model's: a transformed
    checkpoint's matrices fit its own norms only.

    Returns:
        Names of the layers that were replaced.
    """

    def packed(name: str, layer: torch.nn.Linear) -> PackedWeight | None:
        if f"{name}.weight" not in source.schemes:
            return None
        return source.packed(f"{name}.weight").to(layer.weight.device)

    plain = [name for name in source.infos() if name not in source.schemes]
    if HEAD in plain:  # or one that is tied would be written into the embedding
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    parameters = dict(model.named_parameters())
    for name in plain:
        if name not in parameters:
            raise YardstickError(f"{source.path}: the model has no tensor {name}")
        parameters[name].data = source.get(name).to(parameters[name])
    return replace_linears(model, packed, None, path)


def replace_linears(model: torch.nn.Module, packed, skip: str | None, path: str | None) -> list[str]:
    """Put a `QuantLinear` where `packed(name, layer)` gives a weight."""
    replaced, pattern = [], re.compile(skip) if skip else None
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, torch.nn.Linear) or (pattern and pattern.search(name)):
            continue
        weight = packed(name, layer)
        if weight is None:
            continue
        if (weight.out_features, weight.in_features) != tuple(layer.weight.shape):
            raise YardstickError(f"{name} is {list(layer.weight.shape)}, its packed weight has another shape")
        owner = model.get_submodule(name.rpartition(".")[0])
        bias = None if layer.bias is None else layer.bias.detach()
        setattr(owner, name.rpartition(".")[2], QuantLinear(weight, bias, path))
        replaced.append(name)
    if not replaced:
        raise YardstickError("there is no linear layer to replace")
    return replaced


class JoinedLinear(torch.nn.Module):
    """Several packed matrices that share their input, as one: gives the outputs of each."""

    def __init__(self, weights: Sequence[PackedWeight], path: str | None = None) -> None:
        super().__init__()
        self.sizes = [weight.out_features for weight in weights]
        self.linear = QuantLinear(PackedWeight.stack(weights), path=path)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(inputs).split(self.sizes, dim=-1)


def engine_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Different shapes (out, in) of the products that the engine does for a model, joined matrices as one, by the
    names of the first."""
    shapes: dict[tuple[int, int], str] = {}
    for layer in range(config.num_layers):
        linears = config.layer_linears(layer)
        for names in JOINED:
            if all(name in linears for name in names):
                parts = [linears.pop(name) for name in names]
                linears["+".join(names)] = (sum(out for out, _ in parts), parts[0][1])
        for name, shape in linears.items():
            shapes.setdefault(shape, name)
    shapes.setdefault((config.vocab_size, config.hidden_size), "lm_head")
    return {name: shape for shape, name in shapes.items()}


def open_head(source: PackedSource, config: ModelConfig, vocabulary: int, path: str | None = None) -> QuantLinear:
    """The output head of a packed checkpoint, of which the first `vocabulary` rows are real.

    Raises:
        YardstickError: the checkpoint keeps its head in bf16.
    """
    name = head_name(source, config)
    if name not in source.schemes:
        raise YardstickError(f"{source.path}: {name} is not packed")
    return QuantLinear(source.packed(name).rows(vocabulary).to(pick_device()), path=path)


def load_layer(
    source: TensorSource,
    config: ModelConfig,
    layer: int,
    dtype: torch.dtype,
    device: torch.device,
    path: str | None = None,
) -> dict[str, torch.Tensor | QuantLinear]:
    """Tensors of one layer of our forward under their short names, the packed ones as they are stored.

    Matrices that share their input are one, under their names with `+` between; see `parts.linears`.
    """
    packed: dict[str, PackedWeight] = {}
    found: dict[str, torch.Tensor | QuantLinear] = {}
    for name in config.layer_tensors(layer):
        full = config.layer_name(layer, name)
        if isinstance(source, PackedSource) and full in source.schemes:
            packed[name.removesuffix(".weight")] = source.packed(full).to(device)
        else:
            found[name] = source.get(full).to(device=device, dtype=dtype)
    for names in JOINED:
        if all(name in packed for name in names) and len({packed[name].group_size for name in names}) == 1:
            found["+".join(names)] = JoinedLinear([packed.pop(name) for name in names], path)
    for name, weight in packed.items():
        found[f"{name}.weight"] = QuantLinear(weight, path=path)
    return found
