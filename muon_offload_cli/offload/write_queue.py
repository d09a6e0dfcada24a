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
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[Extent, deque[tuple[Extent, Slot, Future[None]]]] = {}
        self._awaited: deque[Extent] = deque()

    def put(self, chunk: Extent, piece: Extent, slot: Slot) -> Future[None]:
        """Append a piece of `chunk`; return the future that whoever takes it has to end."""
        done: Future[None] = Future()
        with self._lock:
            self._chunks.setdefault(chunk, deque()).append((piece, slot, done))
        return done

    def take(self) -> tuple[Extent, Slot, Future[None]]:
        """Remove the next piece; there must be one."""
        with self._lock:
            first = next((chunk for chunk in self._awaited if chunk in self._chunks), None)
            chunk = first or next(iter(self._chunks))
            pieces = self._chunks[chunk]
            taken = pieces.popleft()
            if not pieces:
                del self._chunks[chunk]
            return taken

    def await_chunk(self, chunk: Extent) -> None:
        """Note that `chunk` will be read after all those awaited so far."""
        with self._lock:
            self._awaited.append(chunk)

    def first_is_written(self) -> None:
        """Drop the chunk that was awaited first."""
        with self._lock:
            self._awaited.popleft()
