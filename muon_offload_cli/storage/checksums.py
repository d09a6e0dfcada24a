"""Checksums of what was written, compared when it is read back."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

import xxhash

from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import StoreError

SAMPLE_EVERY = 16


class Verify(enum.Enum):
    """Which extents are compared: none, one in `SAMPLE_EVERY`, or all."""

    OFF = "off"
    SAMPLE = "sample"
    FULL = "full"


class Checksums:
    """Keeps one XXH3 sum (64 bits, xxhash) an extent in memory. Thread-safe; hashing lets other threads run.

    Args:
        verify: Which extents count.
        describe: Says what lies in an extent and when it was written, for the error.
    """

    def __init__(self, verify: Verify, describe: Callable[[Extent], str]) -> None:
        self._every = {Verify.OFF: 0, Verify.SAMPLE: SAMPLE_EVERY, Verify.FULL: 1}[verify]
        self._describe = describe
        self._sums: dict[Extent, int] = {}
        self._lock = threading.Lock()

    def note(self, extent: Extent, data: memoryview) -> None:
        """Remember the sum of `data`, which is about to be written to `extent`."""
        if self._counts(extent):
            digest = xxhash.xxh3_64_intdigest(data)
            with self._lock:
                self._sums[extent] = digest

    def compare(self, extent: Extent, data: memoryview, path: str) -> None:
        """Compare `data`, read from `extent`, with what was written there.

        Raises:
            StoreError: They differ.
        """
        with self._lock:
            expected = self._sums.get(extent)
        if expected is not None and xxhash.xxh3_64_intdigest(data) != expected:
            raise StoreError(
                f"the drive returned other bytes than were written: {self._describe(extent)}",
                path=path,
                operation="read",
                offset=extent.offset,
                nbytes=extent.nbytes,
            )

    def forget(self) -> None:
        """Drop all sums: the bytes were written from outside."""
        with self._lock:
            self._sums.clear()

    def _counts(self, extent: Extent) -> bool:
        # Requests of a chunk follow each other: counting them by size spreads the sample over all chunks.
        return self._every > 0 and (extent.offset // max(extent.nbytes, 1)) % self._every == 0
