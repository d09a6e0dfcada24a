"""The staging ring: a fixed amount of pinned memory for chunks in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from muon_offload_cli.storage.buffer import HostBuffer
from muon_offload_cli.storage.closing import Closing
from muon_offload_cli.storage.extent import ALIGNMENT
from muon_offload_cli.storage.pinning import Pinner


class RingClosed(Exception):  # noqa: N818
    """No slot will come any more: the ring was closed, or aborted (then the cause is chained)."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One staging buffer of a ring, owned by whoever acquired it.

    Attributes:
        index: Its number in the ring.
        memory: Its bytes, aligned to 4096.
    """

    index: int
    memory: memoryview


class StagingRing(Closing):
    """Slots of equal size in one `HostBuffer`, handed out to whoever waits.

    Attributes:
        slots: How many there are.
        slot_bytes: Bytes of each.
        high_water: The most slots that were ever in use at once.
    """

    def __init__(self, slots: int, slot_bytes: int, pin: bool, *, pinner: Pinner | None = None) -> None:
        """Take the memory.

        Args:
            slots: How many buffers; at least 1.
            slot_bytes: Bytes of each; a positive multiple of 4096.
            pin: Page-lock them for CUDA.
            pinner: What locks them; CUDA by default.

        Raises:
            UserError: There is not that much memory, or it cannot be pinned.
            ValueError: The figures make no ring.
        """
        if slots < 1 or slot_bytes < ALIGNMENT or slot_bytes % ALIGNMENT:
            raise ValueError(
                f"a ring of {slots} slots of {slot_bytes} bytes: want >= 1 slot, multiples of 4096"
            )
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.high_water = 0
        self._buffer = HostBuffer(slots * slot_bytes, pin=pin, pinner=pinner)
        memory = self._buffer.memory
        cuts = [memory[index * slot_bytes : (index + 1) * slot_bytes] for index in range(slots)]
        # The slot given back last is handed out first: its pages are the likeliest to be in the caches.
        self._free = [Slot(index, cut) for index, cut in reversed(list(enumerate(cuts)))]
        self._taken: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._cause: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the ring holds."""
        return self.slots * self.slot_bytes

    @property
    def pinned(self) -> bool:
        """The slots are page-locked."""
        return self._buffer.pinned

    def acquire(self) -> Slot:
        """Wait for a free slot and take it.

        Raises:
            RingClosed: The ring is closed or aborted, or became so while waiting.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free) or self._closed)
            return self._take()

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Wait for a free slot and lend its bytes to the context; raises RingClosed as `acquire` does."""
        slot = self.acquire()
        try:
            yield slot.memory
        finally:
            self.release(slot)

    def release(self, slot: Slot) -> None:
        """Give a slot back; nobody may be reading or writing it any more. Allowed after `close` and `abort`.

        Raises:
            ValueError: The slot is not handed out (given back twice, or another ring's).
        """
        with self._changed:
            if slot.index not in self._taken:
                raise ValueError(f"slot {slot.index} is not in use")
            self._taken.remove(slot.index)
            self._free.append(slot)
            self._changed.notify()

    def abort(self, cause: BaseException) -> None:
        """Refuse every caller from now on, the waiting ones included; the first cause is told to all."""
        with self._changed:
            self._cause = self._cause or cause
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits with RingClosed and give the memory back; a second call does nothing.

        Copies from or to slots must have ended.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._buffer.close()

    def _take(self) -> Slot:
        if self._closed:
            raise RingClosed("the staging ring is closed") from self._cause
        slot = self._free.pop()
        self._taken.add(slot.index)
        self.high_water = max(self.high_water, len(self._taken))
        return slot
