"""The mapping that a store's views are parts of."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable

from muon_offload_cli.storage.extent import Extent


class LazyMap:
    """One mapping of all of a store's bytes, made once a view is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None

    def view(self, extent: Extent, make: Callable[[], mmap.mmap]) -> memoryview:
        """Return the bytes of `extent`; `make` maps, the first time, and what it raises is raised."""
        with self._lock:
            if self._map is None:
                self._map = make()
            return memoryview(self._map)[extent.offset : extent.end]

    def drop_pages(self) -> None:
        """Take its pages out of this process; what is mapped would stay in the page cache."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap; views that still exist keep the mapping and its blocks until the last of them goes."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
