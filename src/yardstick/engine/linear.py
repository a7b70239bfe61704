"""A linear layer whose weight stays packed."""

from collections.abc import Callable, Iterator, Sequence

import torch

from yardstick.engine.choose import Choice, Entry, choose
from yardstick.engine.paths import PATHS, Path, open_path
from yardstick.engine.weight import PackedWeight
from yardstick.errors import YardstickError


class QuantLinear(torch.nn.Module):
    """inputs @ W^T + bias for a packed W, by the path that the table of the device names for the number of rows.

    Args:
        weight: of one matrix, or of several that share their input (`PackedWeight.stack`).
        bias: [out], or None.
        path: a path by name for any number of rows that it takes, instead of the table's; other numbers of rows are
            refused.
        entries: a table of measurements instead of that of the device.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        path: str | None = None,
        entries: Sequence[Entry] | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._asked, self._entries = path, entries
        self._chosen: dict[tuple[int, torch.dtype], Path] = {}
        self._opened: dict[tuple, Path] = {}

    def choice(self, rows: int, dtype: torch.dtype) -> Choice:
        """The path for inputs of this many rows.

        Raises:
            YardstickError: a path was asked for that does not take them.
        """
        if self._asked is None:
            return choose(self.weight, dtype, rows, self._entries)
        if self._asked in PATHS and rows not in PATHS[self._asked].rows:
            raise YardstickError(f"path {self._asked} does not take {rows} rows")
        return Choice(self._asked)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out], in the inputs' type."""
        flat = inputs.reshape(-1, self.in_features)
        asked = (len(flat), inputs.dtype)
        if asked not in self._chosen:  # looked up once: a step of decoding takes as long as some lookups
            self._chosen[asked] = self._open(*asked)
        out = self._chosen[asked](flat).view(*inputs.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _open(self, rows: int, dtype: torch.dtype) -> Path:
        """The path for this many rows; those that several numbers of rows share are made once."""
        chosen = self.choice(rows, dtype)
        key = (chosen.path, dtype, *sorted(chosen.tile.items()))
        if key not in self._opened:
            self._opened[key] = open_path(chosen.path, self.weight, dtype, chosen.tile)
        return self._opened[key]

    def _apply(self, move: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "QuantLinear":
        # a module's .to(dtype) would round codes' scales; only the device is followed
        device = move(torch.empty(0, device=self.weight.codes.device)).device
        self.weight, self._chosen, self._opened = self.weight.to(device), {}, {}
        self.bias = None if self.bias is None else move(self.bias)
        return self

    def extra_repr(self) -> str:
        kind = "symmetric " if self.weight.minima is None else ""
        return f"{self.in_features} to {self.out_features}, {kind}int4 in groups of {self.weight.group_size}"


def explain(module: torch.nn.Module, rows: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[str]:
    """A line for each packed matrix of a module: which path it takes for inputs of this many rows, and why."""
    for name, layer in module.named_modules():
        if isinstance(layer, QuantLinear):
            chosen = layer.choice(rows, dtype)
            tile = ", ".join(f"{key} {value}" for key, value in chosen.tile.items())
            yield f"{name} ({layer.extra_repr()}): {chosen.path}{f' ({tile})' if tile else ''}: {chosen.why}"
