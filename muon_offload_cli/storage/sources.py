"""What checkpoint files are written from and read into: stores, with threads and buffers for them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from muon_offload_cli.storage.buffer import address_of
from muon_offload_cli.storage.closing import Closing
from muon_offload_cli.storage.extent import ALIGNMENT, Extent
from muon_offload_cli.storage.ring import StagingRing
from muon_offload_cli.storage.store import Store
from muon_offload_cli.units import PIECE_BYTES, round_up

THREADS = 8
"""Pieces under way at once."""


class Sources(Closing):
    """Stores whose views may be handed to a `PieceWriter`, and what moves pieces of them.

    Args:
        stores: Their bytes must not change while a file is written from them.

    Attributes:
        pool: The threads.
        ring: Buffers of a piece each, one more than there are threads: one is filled meanwhile.
        scratch: A buffer for each thread, of a piece and a page at each end: a tensor may begin anywhere,
            direct I/O may not.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self._ranges = [
            (start, start + store.size, store) for store in stores for start in (store.view_address(),)
        ]
        # torch touches a byte of every tensor that it saves, for which the kernel would read megabytes of the
        # mapping that direct I/O reads anyway.
        self._advise(mmap.MADV_RANDOM)
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="muon-save")
        self.ring = StagingRing(THREADS + 1, PIECE_BYTES, pin=False)
        self.scratch = StagingRing(THREADS, PIECE_BYTES + 2 * ALIGNMENT, pin=False)

    def find(self, data: memoryview) -> tuple[Store, int] | None:
        """Return the store that `data` is a view of and the offset there; None for any other memory."""
        return self.find_address(address_of(data), data.nbytes)

    def find_address(self, address: int, nbytes: int) -> tuple[Store, int] | None:
        """Return the store that shows `nbytes` at `address` and the offset there; None for other memory."""
        for start, end, store in self._ranges:
            if start <= address and address + nbytes <= end:
                return store, address - start
        return None

    @contextmanager
    def reading(self, store: Store, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Read at most a piece of a direct store, from any offset; the bytes are there inside the context.

        Raises:
            StoreError: The store cannot be read.
        """
        start = offset // ALIGNMENT * ALIGNMENT
        extent = Extent(start, round_up(offset + nbytes, ALIGNMENT) - start)
        with self.scratch.lend() as memory:
            store.read_into(extent, memory[: extent.nbytes])
            yield memory[offset - start :][:nbytes]

    def _advise(self, advice: int) -> None:
        for start, end, store in self._ranges:
            if store.direct:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)

    def close(self) -> None:
        """Stop the threads and give the buffers back; before the stores are closed."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._advise(mmap.MADV_NORMAL)
        self.ring.close()
        self.scratch.close()
