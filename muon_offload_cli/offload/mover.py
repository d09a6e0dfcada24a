"""Moving the bytes of a chunk between its place in a tier and its window on the device.

Two ways: a tier whose bytes can be addressed (pinned memory, a file mapping) is copied to and from directly;
a file that is reached with direct I/O goes through a ring of staging buffers and a pool of I/O threads. Both
are driven by the two copying threads of a `Pipeline`, which call `load` and `save` in chunk order.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from muon_offload_cli.offload import lane as lanes
from muon_offload_cli.offload.io_meter import IoMeter
from muon_offload_cli.offload.lane import Lane
from muon_offload_cli.offload.ordered_thread import OrderedThread
from muon_offload_cli.offload.window import Window
from muon_offload_cli.offload.write_queue import WriteQueue
from muon_offload_cli.storage.checksums import Checksums
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.ring import Slot, StagingRing
from muon_offload_cli.storage.store import Store
from muon_offload_cli.units import MIB

HANDOVER_BYTES = 64 * MIB
"""Size of one copy between host and device: small enough to hand a window over as it empties."""

type Emptied = Callable[[int, torch.cuda.Event | None], None]
"""Told how many of a chunk's first bytes have been copied out once the mark has happened."""


class Mover(ABC):
    """Moves chunks of one tier. `load` runs on the upload thread only, `save` on the download thread only."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store = store
        self.meter = IoMeter()
        self._up = Lane(device)
        self._down = Lane(device)

    @abstractmethod
    def load(self, extent: Extent, window: Window, turn: int) -> torch.cuda.Event | None:
        """Fill `window` from `extent` as the turn before `turn` leaves it; return a mark for the end."""

    @abstractmethod
    def save(
        self, extent: Extent, memory: torch.Tensor, after: torch.cuda.Event | None, emptied: Emptied
    ) -> Future[None]:
        """Copy a chunk out of a window's `memory` once `after` happened; the future: it is stored."""

    def prefetch(self, extent: Extent, after: Future[None] | None) -> None:  # noqa: B027 - optional
        """Begin reading, once `after` has ended, a chunk that `load` will be called for in this order."""

    def abort(self) -> None:  # noqa: B027 - optional
        """Wake every thread that waits inside this mover with an error."""

    def close(self) -> None:
        """Wait for copies, stop threads, release buffers; the store is closed by its owner."""
        self._up.finish()
        self._down.finish()


def _spans(nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, step):
        yield start, min(start + step, nbytes)


class AddressableMover(Mover):
    """Copies straight between the store's memory and the window."""

    def load(self, extent: Extent, window: Window, turn: int) -> torch.cuda.Event | None:
        """Enqueue the copies to the device; see `Mover.load`."""
        source = as_bytes(self.store.view(extent))
        mark = None
        for start, end in _spans(extent.nbytes, HANDOVER_BYTES):
            emptied = window.wait_empty(turn, end)
            with self.meter.request(read=end - start):
                mark = self._up.copy(window.memory[start:end], source[start:end], emptied)
        return mark

    def save(
        self, extent: Extent, memory: torch.Tensor, after: torch.cuda.Event | None, emptied: Emptied
    ) -> Future[None]:
        """Copy from the device; the future is done once the bytes have arrived."""
        target = as_bytes(self.store.view(extent))
        mark = None
        for start, end in _spans(extent.nbytes, HANDOVER_BYTES):
            with self.meter.request(written=end - start):
                mark = self._down.copy(target[start:end], memory[start:end], after)
            emptied(end, mark)
        lanes.wait(mark)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Arrival:
    """A chunk that is being read: its pieces in order, each a future of the buffer that holds it."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.pieces: queue.SimpleQueue[Future[Slot]] = queue.SimpleQueue()


class StagedMover(Mover):
    """Streams through pinned staging buffers with direct I/O.

    Reading and writing have rings of their own, so that a full read ring can never keep the write-back from
    emptying the window that the reads wait for.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device,
        *,
        read_ring: StagingRing,
        write_ring: StagingRing,
        threads: int,
        checksums: Checksums,
    ) -> None:
        super().__init__(store, device)
        self.checksums = checksums
        self._read_ring = read_ring
        self._write_ring = write_ring
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="muon-read")
        self._writers = ThreadPoolExecutor(threads, thread_name_prefix="muon-write")
        self._arriving: deque[_Arrival] = deque()
        self._unwritten = WriteQueue()
        self._dispatcher = OrderedThread("muon-dispatch", lambda: None, self._dispatch_failed)

    def prefetch(self, extent: Extent, after: Future[None] | None) -> None:
        """Read ahead as far as free staging buffers reach; see `Mover.prefetch`."""
        arrival = _Arrival(extent)
        self._arriving.append(arrival)
        if after is not None:
            self._unwritten.await_chunk(extent.offset)
        self._dispatcher.submit(lambda: self._dispatch(arrival, after))

    def _dispatch(self, arrival: _Arrival, after: Future[None] | None) -> None:
        extent = arrival.extent
        if after is not None:
            after.result()
            self._unwritten.first_is_written()
        for start, end in _spans(extent.nbytes, self._read_ring.slot_bytes):
            slot = self._read_ring.acquire()
            piece = Extent(extent.offset + start, end - start)
            arrival.pieces.put(self._readers.submit(self._read, piece, slot))

    def _dispatch_failed(self, error: BaseException) -> None:
        """Hand the error to whoever waits for pieces, now and later."""
        failed: Future[Slot] = Future()
        failed.set_exception(error)
        for arrival in list(self._arriving):
            arrival.pieces.put(failed)

    def _read(self, piece: Extent, slot: Slot) -> Slot:
        with self.meter.request(read=piece.nbytes):
            self.store.read_into(piece, slot.memory[: piece.nbytes])
        self.checksums.compare(piece, slot.memory[: piece.nbytes], self.store.path)
        return slot

    def load(self, extent: Extent, window: Window, turn: int) -> torch.cuda.Event | None:
        """Copy pieces to the device as they arrive from disk, in order; see `Mover.load`."""
        arrival = self._arriving[0]
        if arrival.extent != extent:
            raise RuntimeError(
                f"chunk at {extent.offset} is loaded but {arrival.extent.offset} was read ahead"
            )
        mark = None
        for start, end in _spans(extent.nbytes, self._read_ring.slot_bytes):
            slot = arrival.pieces.get().result()
            emptied = window.wait_empty(turn, end)
            mark = self._up.copy(window.memory[start:end], as_bytes(slot.memory[: end - start]), emptied)
            lanes.wait(mark)
            self._read_ring.release(slot)
        self._arriving.popleft()
        return mark

    def save(
        self, extent: Extent, memory: torch.Tensor, after: torch.cuda.Event | None, emptied: Emptied
    ) -> Future[None]:
        """Copy pieces out of the window and hand them to the writers; see `Mover.save`."""
        lanes.wait(after)
        written: list[Future[None]] = []
        for start, end in _spans(extent.nbytes, self._write_ring.slot_bytes):
            slot = self._write_ring.acquire()
            mark = self._down.copy(as_bytes(slot.memory[: end - start]), memory[start:end], after)
            lanes.wait(mark)
            emptied(end, mark)
            piece = Extent(extent.offset + start, end - start)
            written.append(self._unwritten.put(extent.offset, piece, slot))
            self._writers.submit(self._write_next)
        return all_of(written)

    def _write_next(self) -> None:
        piece, slot, done = self._unwritten.take()
        try:
            self._write(piece, slot)
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: whoever waits raises the error
            done.set_exception(error)
        else:
            done.set_result(None)

    def _write(self, piece: Extent, slot: Slot) -> None:
        try:
            self.checksums.note(piece, slot.memory[: piece.nbytes])
            with self.meter.request(written=piece.nbytes):
                self.store.write_from(piece, slot.memory[: piece.nbytes])
        finally:
            self._write_ring.release(slot)

    def abort(self) -> None:
        """Close both rings, which wakes every thread that waits for a staging buffer."""
        self._read_ring.abort(RuntimeError("the pipeline failed"))
        self._write_ring.abort(RuntimeError("the pipeline failed"))

    def close(self) -> None:
        """Stop all threads, then release the rings."""
        super().close()
        self.abort()
        self._dispatcher.stop()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._read_ring.close()
        self._write_ring.close()


def as_bytes(memory: memoryview) -> torch.Tensor:
    """Show memory as a ``uint8`` tensor whose storage is exactly as large as the memory."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def all_of(futures: list[Future[None]]) -> Future[None]:
    """Return a future that ends with the last of `futures`, with the first exception if there is one."""
    together: Future[None] = Future()
    left = len(futures)
    lock = threading.Lock()

    def one_done(future: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if together.done():
                return
            if error := future.exception():
                together.set_exception(error)
            elif left == 0:
                together.set_result(None)

    if not futures:
        together.set_result(None)
    for future in futures:
        future.add_done_callback(one_done)
    return together
