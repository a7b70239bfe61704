"""What a layer remembers of the positions that it has seen, so that the next ones need not see them again.

`LayerState` is that of texts of one length, `BatchState` that of texts of different lengths that are continued
together, one position a step.
"""

import torch

from yardstick.errors import YardstickError


class LayerState:
    """State of one layer for a batch of texts: keys and values, or the window and the memory of a delta net.

    `length` counts the positions seen; room for keys and values is taken once, for `capacity` positions. With `trail`
    set, a delta net also keeps what it was after each position of the last call, so that `rewind` can go back there.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.window: torch.Tensor | None = (
            None  # inputs of the convolution before `length`: [batch, width - 1, channels]
        )
        self.memory: torch.Tensor | None = None  # of the delta rule: fp32 [batch, heads, key_dim, value_dim]
        # (window, memory) after each position of the last call; None: not kept, as for a long prompt
        self.trail: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def positions(self, length: int) -> torch.Tensor:
        """Positions of the next `length` ids."""
        return torch.arange(self.length, self.length + length)

    def advance(self, length: int) -> None:
        """Count the ids that the layer has been through."""
        self.length += length

    def rewind(self, length: int) -> None:
        """Forget all positions from `length` on; what is still in the room of the keys is written over.

        Raises:
            YardstickError: more positions are asked for than were seen, or a delta net did not keep its state there.
        """
        back = self.length - length
        if not 0 <= back <= self.length:
            raise YardstickError(f"a state of {self.length} positions cannot go back to {length}")
        if back and self.memory is not None:
            if back >= len(self.trail or ()):
                raise YardstickError(f"a delta net kept no state to go back to position {length}")
            self.window, self.memory = self.trail[-1 - back]
        self.trail = None if self.trail is None else []
        self.length = length

    @property
    def mask(self) -> None:
        """What is added to the scores of the next position: nothing, it may look at all keys."""
        return None

    def copy(self, capacity: int) -> "LayerState":
        """The same state with other room; a delta net's tensors are never written in place and are shared."""
        other = LayerState(capacity)
        other.length, other.window, other.memory = self.length, self.window, self.memory
        if self.cached:
            shape = (*self._keys.shape[:2], capacity, self._keys.shape[3])
            other._keys, other._values = self._keys.new_empty(shape), self._values.new_empty(shape)
            other._keys[:, :, : self.length], other._values[:, :, : self.length] = self.cached
        return other

    @property
    def cached(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of all positions so far; None for a layer without attention."""
        if self._keys is None:
            return None
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

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


class Slots:
    """The texts of a batch: how long each is, and which of `capacity` positions each may look at.

    Every slot has room for `capacity` positions, and every step looks at all of that room with the part behind a
    text's own length masked: so the arithmetic of one text depends neither on its neighbours nor on how long they are.
    """

    def __init__(self, count: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.capacity = count, capacity
        self._lengths = torch.zeros(count, dtype=torch.int64, device=device)
        self._room = torch.arange(capacity, device=device)
        self.rows = torch.arange(count, device=device)
        self.mask = torch.zeros(count, 1, 1, capacity, dtype=dtype, device=device)
        self.refresh()

    def place(self, slot: int, length: int) -> None:
        """Let a text of some length take a slot.

        Raises:
            YardstickError: it leaves no room for one more position.
        """
        if length >= self.capacity:
            raise YardstickError(f"the cache has room for {self.capacity} positions, {length + 1} are asked for")
        self._lengths[slot] = length
        self.refresh()

    def advance(self) -> None:
        """Count one id for every slot; one that is full stays at its last position, its output is not used."""
        self._lengths.add_(1).clamp_max_(self.capacity - 1)  # in place, like the mask: a CUDA graph keeps addresses
        self.refresh()

    @property
    def lengths(self) -> torch.Tensor:
        """Length of each text, which is the position of its next id."""
        return self._lengths

    def refresh(self) -> None:
        """Make the mask anew, after lengths have changed."""
        # added to the scores: 0 for positions up to the next id's own, minus infinity behind it
        self.mask.zero_().masked_fill_((self._room > self._lengths[:, None])[:, None, None], -torch.inf)


class BatchState:
    """State of one layer for texts of different lengths that share `slots`."""

    trail = None  # a batch never goes back

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.window: torch.Tensor | None = None
        self.memory: torch.Tensor | None = None

    def insert(self, slot: int, state: LayerState) -> None:
        """Put a text with the state that its prefill left into a slot."""
        if state.cached:
            keys, values = state.cached
            if self._keys is None:  # zeros: a masked value still takes part in a product with a weight of 0
                shape = (self.slots.count, keys.shape[1], self.slots.capacity, keys.shape[3])
                self._keys, self._values = keys.new_zeros(shape), values.new_zeros(shape)
            self._keys[slot, :, : state.length], self._values[slot, :, : state.length] = keys[0], values[0]
        if state.memory is not None:
            if self.memory is None:
                self.memory = state.memory.new_zeros((self.slots.count, *state.memory.shape[1:]))
                self.window = state.window.new_zeros((self.slots.count, *state.window.shape[1:]))
            self.memory[slot], self.window[slot] = state.memory[0], state.window[0]

    def positions(self, length: int) -> torch.Tensor:
        """Position of each text's next id, [slots, 1, 1] to go with [slots, heads, 1, head_dim]; `length` is 1."""
        return self.slots.lengths[:, None, None]

    def advance(self, length: int) -> None:
        """Lengths are those of all layers; see `Slots.advance`."""

    @property
    def mask(self) -> torch.Tensor:
        """What is added to the scores of each text's next position: [slots, 1, 1, capacity]."""
        return self.slots.mask

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [slots, heads, 1, head_dim] at each text's own length; gives all of the room."""
        rows, lengths = self.slots.rows, self.slots.lengths
        self._keys[rows, :, lengths], self._values[rows, :, lengths] = keys[:, :, 0], values[:, :, 0]
        return self._keys, self._values
