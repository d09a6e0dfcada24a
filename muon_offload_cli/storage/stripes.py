"""Which bytes of a store lie in which of several files: pure arithmetic."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.units import MIB, round_up

MOST_STRIPE_BYTES = 16 * MIB
"""Two disk requests: a ring of the default size has each direction's requests on six stripes at a time, and a
store of a TiB is some 65,000 mappings, which is what Linux allows a process by default."""

LEAST_STRIPES = 16
"""Stripes of each file, at least: so many that a small store, too, fills all files evenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stripes:
    """A store of `size` bytes over `files` files: stripe i lies in file ``i % files``, after earlier ones.

    Attributes:
        size: Bytes of the store.
        files: How many files share them.
    """

    size: int
    files: int

    @property
    def stripe_bytes(self) -> int:
        """Bytes of a stripe; a multiple of the page size, so that each can be mapped (64 KiB on some ARM)."""
        share = -(-self.size // (self.files * LEAST_STRIPES))
        return min(MOST_STRIPE_BYTES, round_up(max(share, 1), mmap.PAGESIZE))

    @property
    def count(self) -> int:
        """How many stripes there are; the last one may be short."""
        return -(-self.size // self.stripe_bytes)

    def file_bytes(self) -> tuple[int, ...]:
        """Return the size of each file; they differ by one stripe at most and add up to `size`."""
        sizes = [0] * self.files
        for file, part, _ in self.parts(Extent(0, self.size)):
            sizes[file] = part.end
        return tuple(sizes)

    def parts(self, extent: Extent) -> Iterator[tuple[int, Extent, int]]:
        """Cut an extent of the store at the edges of stripes.

        Yields:
            The file, the extent in it, and where that begins relative to `extent`; in order.
        """
        step, start = self.stripe_bytes, extent.offset
        while start < extent.end:
            stripe, inside = divmod(start, step)
            nbytes = min(step - inside, extent.end - start)
            turn, file = divmod(stripe, self.files)
            yield file, Extent(turn * step + inside, nbytes), start - extent.offset
            start += nbytes
