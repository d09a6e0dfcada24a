"""Putting bytes from memory into direct stores, at any offset, behind the caller's back.

A mapping could take them too, but every page would be faulted in, copied and written back on the thread that
loads. Whole pages go to the drive with direct I/O. Pages that a range covers in part, which ranges may share,
are read, changed and written at the end: then nobody else writes there.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from muon_offload_cli.storage.buffer import copy_bytes
from muon_offload_cli.storage.extent import ALIGNMENT, Extent
from muon_offload_cli.storage.ring import StagingRing
from muon_offload_cli.storage.store import Store
from muon_offload_cli.units import PIECE_BYTES, round_up

THREADS = 4
"""Pieces under way at once."""
MOST_WAITING = 16
"""Pieces that may wait for a thread: each keeps the memory alive that it comes from."""


class Placing:
    """Writes under way to direct stores, with threads and buffers of their own: reads go on beside them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="muon-place")
        self._ring = StagingRing(THREADS, PIECE_BYTES, pin=False)
        self._waiting: set[Future[None]] = set()
        self._edges: dict[tuple[Store, int], list[tuple[int, bytes]]] = defaultdict(list)

    def put(self, store: Store, offset: int, source: memoryview) -> None:
        """Begin to write `source` at `offset`; it must not change before `finish`.

        Raises:
            StoreError: An earlier write failed.
        """
        end = offset + source.nbytes
        first, last = round_up(offset, ALIGNMENT), end // ALIGNMENT * ALIGNMENT
        for start in range(first, last, PIECE_BYTES):
            while len(self._waiting) >= MOST_WAITING:
                self._settle()
            extent = Extent(start, min(PIECE_BYTES, last - start))
            part = source[start - offset :][: extent.nbytes]
            self._waiting.add(self._pool.submit(self._write, store, extent, part))
        for low, high in ((offset, min(first, end)), (max(first, last), end)):
            if low < high:
                page = low // ALIGNMENT * ALIGNMENT
                self._edges[store, page].append((low - page, bytes(source[low - offset : high - offset])))

    def _write(self, store: Store, extent: Extent, source: memoryview) -> None:
        with self._ring.lend() as memory:
            copy_bytes(memory[: extent.nbytes], source)
            store.write_from(extent, memory[: extent.nbytes])

    def drain(self) -> None:
        """Wait until whole pages are written; raises StoreError."""
        while self._waiting:
            self._settle()

    def _settle(self) -> None:
        done, self._waiting = wait(self._waiting, return_when=FIRST_COMPLETED)
        for each in done:
            each.result()

    def finish(self) -> None:
        """Wait until everything is written; raises StoreError."""
        self.drain()
        with self._ring.lend() as memory:
            for (store, page), parts in self._edges.items():
                extent = Extent(page, ALIGNMENT)
                store.read_into(extent, memory[:ALIGNMENT])
                for offset, data in parts:
                    memory[offset : offset + len(data)] = data
                store.write_from(extent, memory[:ALIGNMENT])
        self._edges.clear()

    def close(self) -> None:
        """Stop the threads and give the buffers back; what `finish` did not wait for may be lost."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ring.close()
