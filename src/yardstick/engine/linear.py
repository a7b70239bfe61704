"""A linear layer whose weight stays packed."""

from collections.abc import Callable, Iterator, Sequence

import torch

from yardstick.engine.choose import Choice, Entry, choose
from yardstick.engine.paths import PATHS, Path, find_path, open_path
from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError

STORED = ("codes", "scales", "minima")


class QuantLinear(torch.nn.Module):
    """inputs @ W^T + bias for a packed W, by the path that the table of the device names for the number of rows.

    Codes, scales, minima and bias are buffers: they are in the state dict, and go to a device with the module. Their
    types stay: rounding scales again would change the weights. There is no `weight`, which would have to be dense.

    Args:
        weight: of one matrix, of the terms of one, or of several that share their input (`PackedWeight.stack`).
        bias: [out], or None.
        path: a path by name for any number of rows that it takes, instead of the table's; other numbers of rows are
            refused.
        entries: a table of measurements instead of that of the device.

    Raises:
        YardstickError: there is no such path, or it cannot take the matrix here.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        path: str | None = None,
        entries: Sequence[Entry] | None = None,
    ) -> None:
        super().__init__()
        if path is not None:
            find_path(path, weight)
        self.in_features, self.group_size, self.terms = weight.in_features, weight.group_size, weight.terms
        self.out_features = weight.out_features // weight.terms
        for name in STORED:
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("bias", bias)
        self._asked, self._entries = path, entries
        self._forget()

    @property
    def packed(self) -> PackedWeight:
        """The matrix as it is stored."""
        return PackedWeight(self.codes, self.scales, self.minima, self.in_features, self.group_size, self.terms)

    def choice(self, rows: int, dtype: torch.dtype) -> Choice:
        """The path for inputs of this many rows.

        Raises:
            YardstickError: a path was asked for that does not take them, or they are not rows of numbers.
        """
        if rows < 1 or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise YardstickError(
                f"a packed matrix multiplies one row or more of floating-point inputs, not {rows} of {dtype}"
            )
        if self._asked is None:
            return choose(self.packed, dtype, rows, self._entries)
        if rows not in PATHS[self._asked].rows:
            raise YardstickError(f"path {self._asked} does not take {rows} rows")
        return Choice(self._asked)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out], in the inputs' type.

        Raises:
            YardstickError: the inputs are of another width or no floating-point numbers, or the path has no gradient.
        """
        if inputs.ndim == 0 or inputs.shape[-1] != self.in_features:
            raise YardstickError(
                f"a packed matrix of {self.in_features} columns cannot take inputs {list(inputs.shape)}"
            )
        flat = inputs.reshape(-1, self.in_features)
        if not len(flat):
            return inputs.new_zeros(*inputs.shape[:-1], self.out_features)
        out = self.path(len(flat), inputs.dtype)(flat)
        if self.terms > 1:
            out = out.unflatten(-1, (self.terms, -1)).sum(-2)
        out = out.view(*inputs.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def path(self, rows: int, dtype: torch.dtype) -> Path:
        """The path for this many rows, ready; those that several numbers of rows share are made once."""
        asked = (rows, dtype)
        if asked not in self._chosen:  # looked up once: a step of decoding takes as long as some lookups
            chosen = self.choice(rows, dtype)
            key = (chosen.path, dtype, *sorted(chosen.tile.items()))
            if key not in self._opened:
                self._opened[key] = open_path(chosen.path, self.packed, dtype, chosen.tile)
            self._chosen[asked] = self._opened[key]
        return self._chosen[asked]

    def _forget(self) -> None:
        """Drop what was made of a matrix that is no longer this one."""
        self._chosen: dict[tuple[int, torch.dtype], Path] = {}
        self._opened: dict[tuple, Path] = {}

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name in STORED:
            self._forget()

    def _apply(self, move: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "QuantLinear":
        device = move(torch.empty(0, device=self.codes.device)).device
        for name in STORED:
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).to(device))
        self.bias = None if self.bias is None else move(self.bias)
        return self

    def _load_from_state_dict(self, *arguments) -> None:
        super()._load_from_state_dict(*arguments)
        self._forget()

    def extra_repr(self) -> str:
        kind = "symmetric " if self.minima is None else ""
        terms = f"{self.terms} terms of " if self.terms > 1 else ""
        return f"{self.in_features} to {self.out_features}, {terms}{kind}int4 in groups of {self.group_size}"


def explain(module: torch.nn.Module, rows: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[str]:
    """A line for each packed matrix of a module: which path it takes for inputs of this many rows, and why.

    Raises:
        YardstickError: a layer was made for a path that does not take this many rows.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, QuantLinear):
            chosen = layer.choice(rows, dtype)
            tile = ", ".join(f"{key} {value}" for key, value in chosen.tile.items())
            yield f"{name} ({layer.extra_repr()}): {chosen.path}{f' ({tile})' if tile else ''}: {chosen.why}"
