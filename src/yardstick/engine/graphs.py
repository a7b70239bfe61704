"""A step of decoding as one CUDA graph: the kernels are started once, by the device itself.

Everything that a step reads and writes has a fixed address: slots, mask, keys and values are written in place, and what
a delta net makes anew is copied back. A prompt's state may be put into a slot between two steps, also in place.
"""

import torch

from yardstick.errors import YardstickError
from yardstick.models.generate import EagerStep, Model, Stepper
from yardstick.models.parts import Rotary
from yardstick.models.state import BatchState, Slots

WARM_UPS = 3
LIMIT = 1e-3  # of ||replayed - eager|| / ||eager||: the same kernels run, and an address that moved is off by about 1


def stepper_for(device: torch.device) -> Stepper:
    """What runs the steps of decoding on a device."""
    return GraphStep if device.type == "cuda" else EagerStep


class GraphStep(EagerStep):
    """As `EagerStep`, recorded when it is made and replayed at every call.

    Raises:
        YardstickError: the replayed step gives other logits than the eager one.
    """

    def __init__(self, model: Model, states: list[BatchState], slots: Slots, rotary: Rotary) -> None:
        super().__init__(model, states, slots, rotary)
        self._ids = torch.zeros(slots.count, 1, dtype=torch.int64, device=model.device)
        self._nets = [(state, state.memory, state.window) for state in states if state.memory is not None]
        self._record()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self._ids.copy_(ids)
        self._graph.replay()
        return self._logits

    def _step(self) -> torch.Tensor:
        logits = super().__call__(self._ids)
        for state, memory, window in self._nets:
            memory.copy_(state.memory)
            window.copy_(state.window)
            state.memory, state.window = memory, window
        return logits

    def _record(self) -> None:
        # the trials write keys and values behind the texts alone, which the next step does again
        before = [(tensor, tensor.clone()) for _, *both in self._nets for tensor in both]
        before.append((self.slots.lengths, self.slots.lengths.clone()))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                eager = self._step()
                self._restore(before)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._step()
        self._restore(before)
        self._graph.replay()
        self._restore(before)
        difference = float((self._logits - eager).norm() / eager.norm())
        if not difference <= LIMIT:
            raise YardstickError(f"a step recorded as a CUDA graph differs from the eager one by {difference:.2g}")

    def _restore(self, before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, value in before:
            tensor.copy_(value)
        self.slots.refresh()
