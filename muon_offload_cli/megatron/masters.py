"""The life of master weights (main params) whose bytes an offloader owns.

A master is born on the device and brought to its tier at once. Its ``.data`` is a view of its bytes where
they lie as long as it rests, between steps; a NaN on the device, expanded to its shape, while it awaits its
step (a forgotten read shows itself); a view of a window while its chunk is stepped; and that NaN once it is
released. The object stays the same: Megatron keys state by it, and models hold it (``main_param``).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from muon_offload_cli.megatron.muon_state import members_of
from muon_offload_cli.offload.offloader import ChunkState, StateOffloader

type Make = Callable[[Iterable[int]], None]
"""Makes the masters of the weights with these numbers, each as ``main_param`` of its weight."""


class Masters:
    """The masters of one optimizer, and the state that torch's optimizer keeps of each.

    Args:
        optimizer: Torch's. Held weakly: masters outlive it where their model does.
        weights: The model's, in the order of the offloader's plan.
        offloader: Shows where the bytes lie; not held.
        make: Called for one chunk after another, so that never all masters are on the device.

    Attributes:
        all: The masters, in the order of `weights`.
    """

    def __init__(self, optimizer: Any, weights: Sequence[Any], offloader: StateOffloader, make: Make) -> None:
        nan = torch.full((), math.nan, dtype=torch.float32, device=weights[0].device)
        self._placeholders = [nan.expand(weight.shape) for weight in weights]
        self._optimizer = weakref.ref(optimizer)
        for chunk in offloader.fill():
            make(chunk.parameters)
            for index, target in zip(chunk.parameters, chunk.masters, strict=True):
                target.copy_(weights[index].main_param.data)
                weights[index].main_param.data = self._placeholders[index]
        self.all = [weight.main_param for weight in weights]
        self._places = {
            index: (master, kept)
            for chunk in offloader.resting()
            for index, master, kept in members_of(chunk)
        }
        self._awaiting = set(self._places)

    @property
    def _state(self) -> Any:
        # Looked up each time: torch replaces it as it loads.
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer.state

    def rest(self, indices: Iterable[int] | None = None) -> None:
        """Point masters (None: those that await a step, or were just born) and their state at their bytes."""
        for index in sorted(self._awaiting) if indices is None else indices:
            self.all[index].grad = None
            self.all[index].data, kept = self._places[index]
            self._state[self.all[index]].update(kept)
            self._awaiting.discard(index)

    def await_step(self) -> None:
        """Let all look like device tensors, of NaN, until they rest again."""
        self._awaiting.update(self._places)
        for master, placeholder in zip(self.all, self._placeholders, strict=True):
            master.data = placeholder

    def enter(self, chunk: ChunkState) -> None:
        """Point masters and state of a chunk at its window."""
        for index, data, kept in members_of(chunk):
            self.all[index].data = data
            self._state[self.all[index]].update(kept)

    def show(self) -> None:
        """Point all at their bytes and leave gradients as they are; released, there are none."""
        for index, (data, _) in self._places.items():
            self.all[index].data = data

    def keep_loaded_state(self) -> None:
        """Copy state that torch's optimizer has loaded to its place, where it is not there already."""
        for index, (_, kept) in self._places.items():
            state = self._state[self.all[index]]
            for key, place in kept.items():
                if state[key].data_ptr() != place.data_ptr():
                    place.copy_(state[key])
                state[key] = place

    def release(self, offloader: StateOffloader) -> None:
        """Close `offloader`, and first drop every view of its bytes, which would keep them somewhere."""
        for master, placeholder in zip(self.all, self._placeholders, strict=True):
            master.data = placeholder
            self._state.pop(master, None)
        self._places.clear()
        self._awaiting.clear()
        offloader.close()
