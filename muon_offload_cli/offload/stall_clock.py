"""How long the device stood still for data: the part of the I/O that was not hidden."""

from __future__ import annotations

import time
from collections import deque

import torch


class StallClock:
    """Adds up the time between the end of a chunk's work and the arrival of the next chunk.

    On a GPU the training thread runs ahead, so its own waiting says little; two events on the compute stream
    around the wait for an arrival do. They are read once they have happened, which never blocks. On a CPU
    device work ends when the call returns, so the thread's own waiting is the stall.

    """

    def __init__(self, device: torch.device) -> None:
        self._seconds = 0.0
        self._device = device
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._began: torch.cuda.Event | float = 0.0

    def begin(self) -> None:
        """Call before waiting for an arrival, once the earlier work is enqueued."""
        self._began = time.perf_counter() if self._device.type == "cpu" else self._mark()

    def end(self) -> None:
        """Call once the compute stream has been told to wait for the arrival."""
        if isinstance(self._began, float):
            self._seconds += time.perf_counter() - self._began
        else:
            self._pending.append((self._began, self._mark()))
            self._read()

    @property
    def seconds(self) -> float:
        """Stalls so far, as far as they can be read without blocking."""
        self._read()
        return self._seconds

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            began, ended = self._pending.popleft()
            self._seconds += began.elapsed_time(ended) / 1000
