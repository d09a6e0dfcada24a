"""What a machine has for a run's state: filesystems with the directories on them, and host memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muon_offload_cli.checkpoints.room import Coming
from muon_offload_cli.config.rules.directories import by_filesystem
from muon_offload_cli.config.schema import Config
from muon_offload_cli.machine.filesystem import Mount
from muon_offload_cli.planner.plan import NodeTotal, RunPlan
from muon_offload_cli.units import GIB

TB = 10**12
"""Drives are sold in powers of ten."""

NOTHING_SAVED = Coming(saves=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """One filesystem and what the run puts there.

    Attributes:
        mount: The filesystem, as the first of its directories sees it.
        directories: Its offload directories.
        positions: Their places in `offload.directory`.
        count: Offload directories in all.
        checkpoint_bytes: What this machine's part of the checkpoints takes there, beside
            what the next save frees.
    """

    mount: Mount
    directories: tuple[Path, ...]
    positions: tuple[int, ...]
    count: int
    checkpoint_bytes: int

    @property
    def state_room(self) -> int:
        """Bytes that are free for state."""
        return self.mount.free_bytes - self.checkpoint_bytes

    def state_bytes(self, plan: RunPlan) -> int:
        """What ranks of the fullest machine reserve there."""
        return max(self._on(node) for node in plan.nodes)

    def fullest(self, plan: RunPlan) -> NodeTotal:
        """Return the machine that has most there."""
        return max(plan.nodes, key=lambda node: (self._on(node), -node.node))

    def _on(self, node: NodeTotal) -> int:
        shares = node.by_directory(self.count)
        return sum(shares[position] for position in self.positions)

    @property
    def names(self) -> str:
        """The directories, with commas between."""
        return ", ".join(map(str, self.directories))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpace:
    """What a machine has for the state of its ranks.

    Attributes:
        mounts: Filesystem of each offload directory, in order; empty if no engine uses one, or nothing is
            known of them.
        others: Other filesystems of the machine that this user may write to.
        headroom_bytes: Host memory that the job could still take; None: not known.
        coming: Checkpoints that the run saves.
        keep: `checkpoint.keep`.
        checkpoint_mount: Filesystem that they go to; None: not known.
    """

    mounts: Sequence[Mount]
    others: Sequence[Mount]
    headroom_bytes: int | None
    coming: Coming = NOTHING_SAVED
    keep: int | None = None
    checkpoint_mount: Mount | None = None

    def checkpoint_bytes(self, plan: RunPlan) -> int:
        """Return what checkpoints that stand at once take there, beside what the next save frees."""
        return max(0, self.coming.more(self.keep) * self._one(plan) - self.coming.freed)

    def keep_within(self, plan: RunPlan, room_bytes: int) -> int | None:
        """Return the largest `checkpoint.keep` that `room_bytes` are enough for; None: there is none."""
        return self.coming.keep_within((room_bytes + self.coming.freed) // self._one(plan))

    def _one(self, plan: RunPlan) -> int:
        """Return what one takes there: this machine's part, all of it on a network filesystem."""
        shared = self.checkpoint_mount is not None and self.checkpoint_mount.is_network
        return math.ceil(plan.checkpoint_bytes / (1 if shared else len(plan.nodes)))

    def rooms(self, plan: RunPlan) -> tuple[Room, ...]:
        """Group the offload directories by filesystem."""
        saved_on = None if self.checkpoint_mount is None else self.checkpoint_mount.device
        return tuple(
            Room(
                mount=self.mounts[positions[0]],
                directories=tuple(self.mounts[position].directory for position in positions),
                positions=tuple(positions),
                count=len(self.mounts),
                checkpoint_bytes=self.checkpoint_bytes(plan) if device == saved_on else 0,
            )
            for device, positions in by_filesystem(mount.device for mount in self.mounts).items()
        )


def cluster_space(config: Config) -> NodeSpace:
    """Return what a node of the cluster that the recipe names has, as far as its file says."""
    cluster = config.cluster
    mounts: list[Mount] = []
    if cluster.drives and cluster.drive_tb:
        total = round(cluster.drives * cluster.drive_tb * TB)
        # Which drive a directory is on is not known: all of them are taken for one filesystem.
        whole = Mount(
            directory=Path("/"),
            existing=Path("/"),
            mount_point=f"a node of cluster={cluster.name}",
            device=0,
            kind=f"{cluster.drives} drives",
            is_memory=False,
            is_network=False,
            total_bytes=total,
            free_bytes=total,
            writable=True,
        )
        mounts = [
            replace(whole, directory=Path(directory)) for directory in config.offload.directory or ["/"]
        ]
    memory = None if cluster.host_memory_gb is None else round(cluster.host_memory_gb * GIB)
    return NodeSpace(mounts=mounts, others=(), headroom_bytes=memory)
