"""Writing a large file from many sources at once, piece by piece, hashing on the way.

A checkpoint is written from memory, and from extents of a store that passes the page cache by. Reading such
an extent through its mapping would fault it in page by page; here it is read with direct I/O into a few
buffers while earlier pieces are written.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import xxhash

from muon_offload_cli.storage.buffer import address_of
from muon_offload_cli.storage.extent import ALIGNMENT, Extent
from muon_offload_cli.storage.ring import StagingRing
from muon_offload_cli.storage.store import Store
from muon_offload_cli.units import MIB, round_up

PIECE_BYTES = 8 * MIB
SMALL_BYTES = 64 * 1024
SYNC_BYTES = 256 * MIB
"""Bytes after which what was written is brought to the drive and leaves the page cache."""


class Sources:
    """Stores whose views may be handed to a `PieceWriter`, and the threads and buffers that read them.

    Args:
        stores: Their bytes must not change while a file is written from them.
        threads: Pieces under way at once.
    """

    def __init__(self, stores: Sequence[Store], threads: int = 4) -> None:
        self._ranges = [
            (start, start + store.size, store) for store in stores for start in (store.view_address(),)
        ]
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="muon-save")
        direct = any(store.direct for store in stores)
        # One page more than a piece at each end: a tensor may begin anywhere, direct I/O may not.
        self.ring = StagingRing(threads, PIECE_BYTES + 2 * ALIGNMENT, pin=False) if direct else None

    def find(self, data: memoryview) -> tuple[Store, int] | None:
        """Return the store that `data` is a view of and the offset there; None for any other memory."""
        address = address_of(data)
        for start, end, store in self._ranges:
            if start <= address and address + data.nbytes <= end:
                return store, address - start
        return None

    def close(self) -> None:
        """Stop the threads and give the buffers back."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        if self.ring is not None:
            self.ring.close()


class PieceWriter(io.RawIOBase):
    """A new file, open for writing in order. `fileno` and `close` wait until all pieces are written.

    Memory handed to `write` that belongs to a store of `sources` is read later, by the time of the next
    `fileno` or `close`; any other memory is done with when `write` returns.

    Attributes:
        path: The file.
        pieces: After `close`, length and hash of every piece in order.
        error: The first error; the file is then useless.
    """

    def __init__(
        self,
        path: Path,
        sources: Sources,
        *,
        pwrite: Callable[[int, memoryview, int], int] = os.pwrite,
    ) -> None:
        super().__init__()
        self.path = path
        self.pieces: list[tuple[int, str]] = []
        self.error: OSError | None = None
        self._sources = sources
        self._pwrite = pwrite
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._position = 0
        self._small = bytearray()
        self._hashes: list[Future[tuple[int, str]]] = []
        self._waiting: set[Future[tuple[int, str]]] = set()
        self._lock = threading.Lock()
        self._unsynced = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position, and end a piece there: items are told apart by it."""
        self._end_small()
        return self._position

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """Take bytes; raises OSError of an earlier piece as well."""
        view = memoryview(data).cast("B")
        if view.nbytes < SMALL_BYTES:
            self._small += view
            self._position += view.nbytes
            if len(self._small) >= PIECE_BYTES:
                self._end_small()
            return view.nbytes
        self._end_small()
        found = self._sources.find(view)
        begun = []
        for start in range(0, view.nbytes, PIECE_BYTES):
            part = view[start : start + PIECE_BYTES]
            if found is not None and found[0].direct:
                piece = found[0], found[1] + start, part.nbytes
                begun.append(self._submit(part.nbytes, self._from_store, *piece))
            else:
                begun.append(self._submit(part.nbytes, self._from_memory, part))
        if found is None:
            self._wait_for(set(begun))
        return view.nbytes

    def _end_small(self) -> None:
        if self._small:
            data, self._small = self._small, bytearray()
            self._position -= len(data)
            self._submit(len(data), self._from_memory, memoryview(data))

    def _submit(
        self, nbytes: int, task: Callable[..., tuple[int, str]], *arguments: object
    ) -> Future[tuple[int, str]]:
        # Bounded: what is queued keeps memory alive.
        while len(self._waiting) > 64:
            done, self._waiting = wait(self._waiting, return_when=FIRST_COMPLETED)
            self._raise_of(done)
        future = self._sources.pool.submit(task, *arguments, self._position)
        self._position += nbytes
        self._hashes.append(future)
        self._waiting.add(future)
        return future

    def _from_memory(self, data: memoryview, position: int) -> tuple[int, str]:
        digest = xxhash.xxh3_64_hexdigest(data)
        self._put(data, position)
        return data.nbytes, digest

    def _from_store(self, store: Store, offset: int, nbytes: int, position: int) -> tuple[int, str]:
        ring = self._sources.ring
        if ring is None:
            raise RuntimeError("there is no ring for a direct store")
        start = offset // ALIGNMENT * ALIGNMENT
        extent = Extent(start, round_up(offset + nbytes, ALIGNMENT) - start)
        slot = ring.acquire()
        try:
            store.read_into(extent, slot.memory[: extent.nbytes])
            return self._from_memory(slot.memory[offset - start :][:nbytes], position)
        finally:
            ring.release(slot)

    def _put(self, data: memoryview, position: int) -> None:
        done = 0
        try:
            while done < data.nbytes:
                done += self._pwrite(self._fd, data[done:], position + done)
        except OSError as error:
            error.filename = str(self.path)
            self.error = self.error or error
            raise
        with self._lock:
            self._unsynced += data.nbytes
            due = self._unsynced >= SYNC_BYTES
            if due:
                self._unsynced = 0
        if due:
            self._settle()

    def _settle(self) -> None:
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _wait_for(self, futures: set[Future[tuple[int, str]]]) -> None:
        done, _ = wait(futures)
        self._waiting -= done
        self._raise_of(done)

    def _raise_of(self, done: set[Future[tuple[int, str]]]) -> None:
        for future in done:
            future.result()

    def flush(self) -> None:
        """Do nothing: `fileno` and `close` bring everything to its end."""

    def fileno(self) -> int:
        """Wait for all pieces and return the descriptor, for fsync.

        Raises:
            OSError: A piece could not be written.
            StoreError: A piece could not be read.
        """
        self._end_small()
        self._wait_for(set(self._waiting))
        return self._fd

    def close(self) -> None:
        """Wait for all pieces, drop the page cache's copy, close; raises as `fileno` does."""
        if self.closed:
            return
        try:
            self.fileno()
            self.pieces = [future.result() for future in self._hashes]
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            wait(self._waiting)
            super().close()
            os.close(self._fd)
