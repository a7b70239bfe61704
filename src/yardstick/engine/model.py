"""Models whose matrices stay packed: transformers' own, changed in place, and layers of our forward."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from yardstick.engine.linear import QuantLinear
from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError
from yardstick.models.attention import QKV
from yardstick.models.config import ModelConfig
from yardstick.models.generate import Model
from yardstick.models.layers import GATE_UP
from yardstick.models.prefill import head_name, pick_device
from yardstick.quantize.grid import Grid, round_to_nearest
from yardstick.sources.base import TensorSource
from yardstick.sources.kinds import is_size
from yardstick.sources.packed import PackedSource

# matrices that share their input, and are one matrix in the engine: one pass over the input, one kernel to start
JOINED = (QKV, GATE_UP)
GROUP_SIZE, MSE, HEAD = "group_size", "mse", "lm_head.weight"


def quantize_model(model: torch.nn.Module, recipe: dict, skip: str | None = None, path: str | None = None) -> list[str]:
    """Replace the linear layers of a transformers model by packed ones, rounded to nearest, in place.

    Args:
        recipe: `group_size`, and `mse` for the search of ranges; methods that need text are `load_packed`'s.
        skip: regular expression; layers whose name it finds stay as they are.
        path: of `QuantLinear`.

    Returns:
        Names of the layers that were replaced.

    Raises:
        YardstickError: the recipe is not of rounding to nearest, the path or the expression is none, a layer is linear
            in a way of its own, or nothing is left to replace. The model is then as it was.
    """
    size, mse = (recipe.get(key) for key in (GROUP_SIZE, MSE)) if isinstance(recipe, dict) else (None, None)
    if not is_size(size) or size < 2 or mse not in (None, True, False):
        raise YardstickError("quantize_model: the recipe is a group_size of 2 or more, and mse true or false or not")
    if recipe.get("method", "rtn") != "rtn" or set(recipe) - {"method", GROUP_SIZE, MSE}:
        raise YardstickError("quantize_model rounds to nearest: its recipe has a group_size, and mse or not")
    try:
        pattern = re.compile(skip) if skip else None
    except (re.error, TypeError) as error:
        raise YardstickError(f"quantize_model: skip: {skip!r} is not a regular expression ({error})") from None
    grid = Grid(size, bool(mse))

    def packed(layer: torch.nn.Linear) -> PackedWeight:
        return PackedWeight.pack(*round_to_nearest(layer.weight.detach().float(), grid), grid.group_size)

    chosen = {name: layer for name, layer in linear_layers(model).items() if not (pattern and pattern.search(name))}
    return replace(model, {name: partial(packed, layer) for name, layer in chosen.items()}, path)


def load_packed(model: torch.nn.Module, source: PackedSource | str | Path, path: str | None = None) -> list[str]:
    """Load a packed checkpoint into a transformers model of its architecture, in place.

    Packed matrices stay packed, and all other tensors are the checkpoint's too: a transformed one's matrices fit its
    own norms only.

    Args:
        source: the checkpoint, or its folder.
        path: of `QuantLinear`.

    Returns:
        Names of the layers that were replaced.

    Raises:
        YardstickError: a tensor has no place in the model, or a parameter none in the checkpoint.
    """
    source = source if isinstance(source, PackedSource) else PackedSource(Path(source))
    layers, parameters = linear_layers(model), dict(model.named_parameters(remove_duplicate=False))
    own = {name for name, _ in model.named_parameters()}  # without the second name of a tied head
    packed = {name.removesuffix(".weight"): name for name in source.schemes}
    plain = [name for name in source.infos() if name not in source.schemes]
    homeless = [name for name in packed if name not in layers] + [name for name in plain if name not in parameters]
    missing = own - set(plain) - set(source.schemes)
    if homeless or missing:
        fault = f"{homeless[0]} has no place in the model" if homeless else f"{min(missing)} of the model is not in it"
        raise YardstickError(f"{source.path}: {fault}; is it a checkpoint of this architecture?")
    for name in [*plain, *source.schemes]:
        shape = parameters[name].shape if name in plain else layers[name.removesuffix(".weight")].weight.shape
        if source.infos()[name].shape != tuple(shape):
            raise YardstickError(f"{source.path}: {name} is {list(source.infos()[name].shape)}, not {list(shape)}")
    names = replace(model, {name: partial(source.packed, packed[name]) for name in layers if name in packed}, path)
    if HEAD in plain and HEAD not in own:  # it was tied, and would be written into the embedding
        parameters[HEAD] = torch.nn.Parameter(parameters[HEAD].detach().clone())
        layers[HEAD.removesuffix(".weight")].weight = parameters[HEAD]
        untie(model)
    with torch.no_grad():
        for name in plain:
            parameters[name].copy_(source.get(name))
    return names


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Linear layers of a model by name; one that is used in several places has several names.

    Raises:
        YardstickError: the model is itself one, which cannot be replaced in place.
    """
    if isinstance(model, torch.nn.Linear):
        raise YardstickError("a linear layer cannot be replaced in itself; give the module that holds it")
    found = model.named_modules(remove_duplicate=False)
    return {name: layer for name, layer in found if isinstance(layer, torch.nn.Linear)}


def replace(model: torch.nn.Module, weights: dict[str, Callable[[], PackedWeight]], path: str | None) -> list[str]:
    """Put a `QuantLinear` in the place of each of these linear layers, in place of a shared one the same."""
    if not weights:
        raise YardstickError("there is no linear layer to replace")
    made: dict[int, QuantLinear] = {}
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        if type(layer) is not torch.nn.Linear:
            raise YardstickError(
                f"{name} is a {type(layer).__name__}, whose forward may do more than multiply; skip it"
            )
        if id(layer) not in made:
            bias = None if layer.bias is None else layer.bias.detach()
            made[id(layer)] = QuantLinear(weight().to(layer.weight.device), bias, path)
    places = [(model.get_submodule(name.rpartition(".")[0]), name, model.get_submodule(name)) for name in weights]
    for owner, name, layer in places:
        setattr(owner, name.rpartition(".")[2], made[id(layer)])
    if HEAD.removesuffix(".weight") in weights:
        untie(model)
    return list(weights)


def untie(model: torch.nn.Module) -> None:
    """Keep transformers from tying a dense head to the embedding again."""
    if hasattr(model, "config"):
        model.config.tie_word_embeddings = False


class JoinedLinear(torch.nn.Module):
    """Several packed matrices that share their input, as one: gives the outputs of each."""

    def __init__(self, weights: Sequence[PackedWeight], path: str | None = None) -> None:
        super().__init__()
        self.sizes = [weight.out_features for weight in weights]
        self.linear = QuantLinear(PackedWeight.stack(weights), path=path)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(inputs).split(self.sizes, dim=-1)


def engine_shapes(
    config: ModelConfig, group_of: Callable[[str], int | None], terms_of: Callable[[str], int] = lambda name: 1
) -> dict[str, tuple[int, int, int]]:
    """Different shapes (out, in, group size) of the engine's products for a model, joined matrices as one, by the names
    of the first. `group_of` gives the group size of a matrix by its full name, or None where it is not packed;
    `terms_of` its terms, whose rows lie behind each other."""
    shapes: dict[tuple[int, int, int], str] = {}
    for layer in range(config.num_layers):
        linears = config.layer_linears(layer)
        groups = {name: group_of(config.layer_name(layer, f"{name}.weight")) for name in linears}
        terms = {name: terms_of(config.layer_name(layer, f"{name}.weight")) for name in linears}
        found = {
            name: (terms[name] * out, width, groups[name]) for name, (out, width) in linears.items() if groups[name]
        }
        for names in JOINED:
            if can_be_joined([(groups.get(name), terms.get(name)) for name in names]):
                parts = [found.pop(name) for name in names]
                found["+".join(names)] = (sum(out for out, _, _ in parts), *parts[0][1:])
        for name, shape in found.items():
            shapes.setdefault(shape, name)
    if size := group_of(HEAD):
        shapes.setdefault((terms_of(HEAD) * config.vocab_size, config.hidden_size, size), HEAD.removesuffix(".weight"))
    return {name: shape for shape, name in shapes.items()}


def can_be_joined(kinds: Sequence[tuple[int | None, int | None]]) -> bool:
    """Whether matrices of these group sizes and terms can be joined: all are packed alike, and have one term."""
    return len(set(kinds)) == 1 and kinds[0][0] is not None and kinds[0][1] == 1


def open_model(
    source: PackedSource, config: ModelConfig, dtype: torch.dtype, vocabulary: int, path: str | None = None
) -> Model:
    """A packed checkpoint for generation, its packed matrices as they are stored; `path` is that of `QuantLinear`.

    The first `vocabulary` rows of the head are real. A head that the checkpoint keeps in bf16 is dense.
    """
    name = head_name(source, config)
    packed = source.packed(name).rows(vocabulary).to(pick_device()) if name in source.schemes else None
    head = None if packed is None else QuantLinear(packed, path=path)
    return Model(source, config, dtype, vocabulary, partial(load_layer, path=path), head)


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
        parts = [packed.get(name) for name in names]
        if can_be_joined([(part.group_size, part.terms) if part else (None, None) for part in parts]):
            found["+".join(names)] = JoinedLinear([packed.pop(name) for name in names], path)
    for name, weight in packed.items():
        found[f"{name}.weight"] = QuantLinear(weight, path=path)
    return found
