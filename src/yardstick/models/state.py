"""What a layer remembers of the positions that it has seen, so that the next ones need not see them again."""

import torch

from yardstick.errors import YardstickError


class LayerState:
    """State of one layer for a batch of texts: keys and values, or the window and the memory of a delta net.

    `length` counts the positions seen; room for keys and values is taken once, for `capacity` positions.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.window: torch.Tensor | None = (
            None  # inputs of the convolution before `length`: [batch, width - 1, channels]
        )
        self.memory: torch.Tensor | None = None  # of the delta rule: fp32 [batch, heads, key_dim, value_dim]

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [batch, heads, new, head_dim]; gives those of all positions so far.

        Raises:
            YardstickError: there is no room left.
        """
        start, stop = self.length, self.length + keys.shape[2]
        if stop > self.capacity:
            raise YardstickError(f"the cache has room for {self.capacity} positions, {stop} are asked for")
        if self._keys is None:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, start:stop], self._values[:, :, start:stop] = keys, values
        return self._keys[:, :, :stop], self._values[:, :, :stop]
