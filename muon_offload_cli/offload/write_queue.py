"""In which order staged pieces go to disk."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.ring import Slot


class WriteQueue:
    """Pieces that wait for a writer: first those of chunks that will be read, in that order, then the oldest.

    Each sweep goes the other way than the one before, so it reads first what was handed over last. Oldest
    first alone, a large ring would have to be written to its end before the first read.

    A chunk is told by where it begins: what is written at birth ends before what is read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[int, deque[tuple[Extent, Slot, Future[None]]]] = {}
        self._awaited: deque[int] = deque()

    def put(self, chunk: int, piece: Extent, slot: Slot) -> Future[None]:
        """Append a piece of the chunk at `chunk`; return the future that whoever takes it has to end."""
        done: Future[None] = Future()
        with self._lock:
            self._chunks.setdefault(chunk, deque()).append((piece, slot, done))
        return done

    def take(self) -> tuple[Extent, Slot, Future[None]]:
        """Remove the next piece; there must be one."""
        with self._lock:
            chunk = next(chunk for chunk in (*self._awaited, *self._chunks) if chunk in self._chunks)
            pieces = self._chunks[chunk]
            taken = pieces.popleft()
            if not pieces:
                del self._chunks[chunk]
            return taken

    def await_chunk(self, chunk: int) -> None:
        """Note that the chunk at `chunk` will be read after all those awaited so far."""
        with self._lock:
            self._awaited.append(chunk)

    def first_is_written(self) -> None:
        """Drop the chunk that was awaited first."""
        with self._lock:
            self._awaited.popleft()
