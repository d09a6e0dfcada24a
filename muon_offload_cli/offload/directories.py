"""How the ranks of a node use several directories: pure arithmetic, the same for the run and for its plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muon_offload_cli.storage.stripes import Stripes


def are_spread(count: int, ranks: int) -> bool:
    """Whether each of `ranks` local ranks has one of `count` directories for its own.

    Only where each directory gets equally many ranks; every rank stripes over all of them otherwise.
    """
    return ranks % count == 0


def directories_of(directories: Sequence[Path], *, ranks: int, local_rank: int) -> tuple[Path, ...]:
    """Return what one rank uses: one directory, taken in turn, or all.

    In turn, because neighbours among the ranks belong to one pipeline stage and hold alike.

    Args:
        directories: Of the node.
        ranks: Ranks of the node.
        local_rank: The rank's number on its node.
    """
    if directories and are_spread(len(directories), ranks):
        return (directories[local_rank % len(directories)],)
    return tuple(directories)


def bytes_by_directory(rank_bytes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return what the ranks of a node reserve in each directory, given what each reserves in all.

    Args:
        rank_bytes: By local rank.
        count: Directories of the node, at least one.
    """
    if are_spread(count, len(rank_bytes)):
        return tuple(sum(rank_bytes[first::count]) for first in range(count))
    shares = [Stripes(size=size, files=count).file_bytes() for size in rank_bytes]
    return tuple(map(sum, zip(*shares, strict=True)))


def describe(count: int, ranks: int) -> str:
    """Say how `ranks` local ranks share `count` directories; empty for one."""
    if count <= 1:
        return ""
    if not are_spread(count, ranks):
        return f"each rank's file is striped over all {count} directories"
    each = ranks // count
    return f"ranks are spread over {count} directories, {each} to each"
