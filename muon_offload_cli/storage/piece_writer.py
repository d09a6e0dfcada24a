"""Writing a large file from many sources at once, block by block, hashing on the way.

A checkpoint is written from memory, and from extents of a store that passes the page cache by. The file is
put together in aligned blocks that go to the drive with direct I/O, several at once, while later ones are
filled: through the page cache every byte would be copied twice, and then be waited for. An extent of a direct
store is read with direct I/O too: its mapping would be faulted in page by page.
"""

from __future__ import annotations

import fcntl
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from muon_offload_cli.machine.anonymous_file import enable_direct_io
from muon_offload_cli.storage.buffer import copy_bytes
from muon_offload_cli.storage.extent import ALIGNMENT
from muon_offload_cli.storage.ring import Slot
from muon_offload_cli.storage.sources import Sources
from muon_offload_cli.storage.store import Store
from muon_offload_cli.units import GIB, MIB, PIECE_BYTES, round_up

LARGE_BYTES = 64 * 1024
"""A write of at least this size is pieces of its own, so that a reader of one tensor can check just that."""
SYNC_BYTES = 256 * MIB
"""Without direct I/O: bytes after which what was written goes to the drive and out of the page cache."""
GROW_BYTES = GIB
"""By how much the file is longer than what is written: writes that lengthen a file go one at a time."""


@dataclass(slots=True)
class _Block:
    """An aligned part of the file that is being put together.

    Attributes:
        start: Its place in the file.
        slot: Its bytes.
        filled: How many of them are there, or will be once `reads` are done.
        reads: Where bytes of a store belong: offset in the block, store, offset there, bytes.
        ends: Where pieces end in the block.
    """

    start: int
    slot: Slot
    filled: int = 0
    reads: list[tuple[int, Store, int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def end_piece(self) -> None:
        if self.filled and self.filled not in self.ends[-1:]:
            self.ends.append(self.filled)


class PieceWriter(io.RawIOBase):
    """A new file, open for writing in order. `fileno` and `close` end it and wait until all is written.

    Memory handed to `write` that shows a direct store of `sources` is read later, by the time of the next
    `fileno` or `close`; any other memory is done with when `write` returns.

    Attributes:
        path: The file.
        direct: It passes the page cache by.
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
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self.direct = enable_direct_io(self._fd)
        except OSError as error:
            os.close(self._fd)
            error.filename = str(path)
            raise
        self._position = 0
        self._length = 0
        self._block: _Block | None = None
        self._ended = False
        self._done: list[Future[list[tuple[int, str]]]] = []
        self._checked = 0
        self._lock = threading.Lock()
        self._unsynced = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position, and end a piece there: items are told apart by it."""
        if self._block is not None:
            self._block.end_piece()
        return self._position

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """Take bytes; raises OSError of an earlier block as well."""
        if self._ended:
            raise ValueError(f"{self.path} has ended")
        view = memoryview(data).cast("B")
        large = view.nbytes >= LARGE_BYTES
        found = self._sources.find(view) if large else None
        done = 0
        if large:
            self.tell()
        while done < view.nbytes:
            block = self._block = self._block or self._begin()
            part = view[done : done + PIECE_BYTES - block.filled]
            if found is not None and found[0].direct:
                block.reads.append((block.filled, found[0], found[1] + done, part.nbytes))
            else:
                copy_bytes(block.slot.memory[block.filled :][: part.nbytes], part)
            block.filled += part.nbytes
            done += part.nbytes
            self._position += part.nbytes
            if block.filled == PIECE_BYTES:
                self._submit(block)
        if large:
            self.tell()
        return view.nbytes

    def _begin(self) -> _Block:
        while self._checked < len(self._done) and self._done[self._checked].done():
            self._done[self._checked].result()
            self._checked += 1
        return _Block(self._position, self._sources.ring.acquire())

    def _submit(self, block: _Block) -> None:
        block.end_piece()
        self._block = None
        try:
            if self._position > self._length:
                self._length = self._position + GROW_BYTES
                os.ftruncate(self._fd, self._length)
        except OSError as error:
            self._sources.ring.release(block.slot)
            raise self._failed(error) from error
        self._done.append(self._sources.pool.submit(self._finish, block))

    def _finish(self, block: _Block) -> list[tuple[int, str]]:
        memory = block.slot.memory
        try:
            for offset, store, start, nbytes in block.reads:
                with self._sources.reading(store, start, nbytes) as data:
                    copy_bytes(memory[offset : offset + nbytes], data)
            pieces, begin = [], 0
            for end in block.ends:
                pieces.append((end - begin, xxhash.xxh3_64_hexdigest(memory[begin:end])))
                begin = end
            # The file is cut to its length at the end.
            padded = round_up(block.filled, ALIGNMENT)
            memory[block.filled : padded] = bytes(padded - block.filled)
            self._put(memory[:padded], block.start)
            return pieces
        finally:
            self._sources.ring.release(block.slot)

    def _put(self, data: memoryview, position: int) -> None:
        done = 0
        try:
            while done < data.nbytes:
                done += self._pwrite(self._fd, data[done:], position + done)
                if done < data.nbytes:
                    # A short direct write may end where direct I/O cannot begin. Through the page cache the
                    # rest succeeds, or fails with its own reason.
                    self._go_through_cache()
        except OSError as error:
            raise self._failed(error) from error
        with self._lock:
            self._unsynced += 0 if self.direct else data.nbytes
            due = self._unsynced >= SYNC_BYTES
            if due:
                self._unsynced = 0
        if due:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _go_through_cache(self) -> None:
        self.direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def _failed(self, error: OSError) -> OSError:
        """Put the file's name into an error and remember the first one."""
        error.filename = str(self.path)
        self.error = self.error or error
        return error

    def flush(self) -> None:
        """Do nothing: `fileno` and `close` bring everything to its end."""

    def fileno(self) -> int:
        """End the file, wait for all of it, and return the descriptor, for fsync.

        Raises:
            OSError: A block could not be written.
            StoreError: A store could not be read.
        """
        self._ended = True
        if self._block is not None:
            self._submit(self._block)
        wait(self._done)
        for future in self._done:
            future.result()
        try:
            os.ftruncate(self._fd, self._position)
        except OSError as error:
            raise self._failed(error) from error
        return self._fd

    def close(self) -> None:
        """End the file, wait for all of it, and close it; raises as `fileno` does."""
        if self.closed:
            return
        try:
            self.fileno()
            self.pieces = [piece for future in self._done for piece in future.result()]
            if not self.direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            wait(self._done)
            super().close()
            os.close(self._fd)
