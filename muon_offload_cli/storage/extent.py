"""Where bytes lie in a store: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muon_offload_cli.units import round_up

ALIGNMENT = 4096
"""Bytes that offsets, sizes and addresses are multiples of; no drive asks direct I/O for more."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of a store.

    Attributes:
        offset: First byte.
        nbytes: Number of bytes; `lay_out` makes it a multiple of the alignment.
    """

    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.nbytes < 0:
            raise ValueError(f"an extent has no negative offset or size: {self.offset}, {self.nbytes}")

    @property
    def end(self) -> int:
        """The first byte after the extent."""
        return self.offset + self.nbytes


def lay_out(sizes: Sequence[int]) -> list[Extent]:
    """Place byte ranges back to back from offset 0, each size rounded up to `ALIGNMENT`.

    Args:
        sizes: Bytes that each range holds, in order; zero is allowed.

    Returns:
        One extent a size, in the same order. The last one's `end` is the size of a store that holds them all.
    """
    extents = []
    offset = 0
    for size in sizes:
        extent = Extent(offset, round_up(size, ALIGNMENT))
        extents.append(extent)
        offset = extent.end
    return extents
