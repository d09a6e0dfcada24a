"""Does the plan fit this machine, and what would make it fit: computed with the same planner. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muon_offload_cli.config.rules.directories import by_filesystem
from muon_offload_cli.config.rules.directory import KEY, as_word
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem
from muon_offload_cli.machine.filesystem import Mount
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.planner.plan import NodeTotal, RunPlan
from muon_offload_cli.units import GIB, format_bytes

TB = 10**12
"""Drives are sold in powers of ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpace:
    """What a machine has for the state of its ranks.

    Attributes:
        mounts: Filesystem of each offload directory, in order; empty if no engine uses one, or nothing is
            known of them.
        others: Other filesystems of the machine that this user may write to.
        headroom_bytes: Host memory that the job could still take; None: not known.
        checkpoints: Checkpoints that this run will leave.
        checkpoint_device: Number of the filesystem that they go to; None: not known.
    """

    mounts: Sequence[Mount]
    others: Sequence[Mount]
    headroom_bytes: int | None
    checkpoints: int = 0
    checkpoint_device: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """One filesystem and what the run puts there.

    Attributes:
        mount: The filesystem, as the first of its directories sees it.
        directories: Its offload directories.
        positions: Their places in `offload.directory`.
        count: Offload directories in all.
        checkpoint_bytes: What this machine's part of the checkpoints takes there.
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
class Fit:
    """The verdict.

    Attributes:
        needed_bytes: What ranks of the fullest machine reserve in the offload directories.
        checkpoint_bytes: What this machine's part of the checkpoints takes on the same filesystems.
        free_bytes: What is free there; None if no directory is used or nothing is known of it.
        rooms: The filesystems, each once.
        host_needed_bytes: Host memory for state and staging.
        headroom_bytes: Host memory that there is; None: not known.
        problems: Why it does not fit, each with what would make it fit; empty if it fits.
    """

    needed_bytes: int
    checkpoint_bytes: int
    free_bytes: int | None
    rooms: tuple[Room, ...]
    host_needed_bytes: int
    headroom_bytes: int | None
    problems: tuple[Problem, ...]

    @property
    def peak_bytes(self) -> int:
        """What the offload directories' filesystems hold when the last checkpoint is written."""
        return self.needed_bytes + self.checkpoint_bytes

    @property
    def fits(self) -> bool:
        """Nothing stands in the way."""
        return not self.problems


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


def judge_fit(
    plan: RunPlan,
    space: NodeSpace,
    settings: OffloadSettings,
    replan: Callable[[OffloadSettings], RunPlan],
) -> Fit:
    """Compare a plan with a machine.

    Args:
        plan: The plan under `settings`.
        space: What the machine has.
        settings: Of one rank.
        replan: Plans the same model under other settings, to compute what would fit.
    """
    node = plan.heaviest_node
    rooms = _rooms(plan, space)
    host = node.host_bytes + node.staging_bytes
    problems = [
        _no_room(plan, space, room, settings, replan)
        for room in rooms
        if room.state_bytes(plan) > room.state_room
    ]
    if space.headroom_bytes is not None and host > space.headroom_bytes:
        problems.append(_no_memory(plan, space.headroom_bytes, host, settings))
    return Fit(
        needed_bytes=node.disk_bytes,
        checkpoint_bytes=sum(room.checkpoint_bytes for room in rooms),
        free_bytes=sum(room.mount.free_bytes for room in rooms) if rooms else None,
        rooms=rooms,
        host_needed_bytes=host,
        headroom_bytes=space.headroom_bytes,
        problems=tuple(problems),
    )


def _rooms(plan: RunPlan, space: NodeSpace) -> tuple[Room, ...]:
    """Group the offload directories by filesystem."""
    checkpoints = space.checkpoints * math.ceil(plan.checkpoint_bytes / len(plan.nodes))
    return tuple(
        Room(
            mount=space.mounts[positions[0]],
            directories=tuple(space.mounts[position].directory for position in positions),
            positions=tuple(positions),
            count=len(space.mounts),
            checkpoint_bytes=checkpoints if device == space.checkpoint_device else 0,
        )
        for device, positions in by_filesystem(mount.device for mount in space.mounts).items()
    )


def _no_room(
    plan: RunPlan,
    space: NodeSpace,
    room: Room,
    settings: OffloadSettings,
    replan: Callable[[OffloadSettings], RunPlan],
) -> Problem:
    node, mount, checkpoints = room.fullest(plan), room.mount, room.checkpoint_bytes
    needed = room.state_bytes(plan) + checkpoints
    parts = f" ({format_bytes(checkpoints)} of it checkpoints)" if checkpoints else ""
    ways = [f"free {format_bytes(needed - mount.free_bytes)} on {mount.mount_point}"]
    ways += _without(plan, space, room)
    ways += _other_mounts(space, room, node.disk_bytes)
    ways += _more_nodes(plan, room)
    if room.state_room > 0:
        ways += _smaller_fraction(settings, replan, room)
        ways += _more_memory(plan, space, settings, replan, room)
    return Problem(
        what=f"node {node.node} needs {format_bytes(needed)}{parts} on {mount.mount_point} ({mount.kind}), "
        f"which has {format_bytes(mount.free_bytes)} free ({KEY}={room.names}).",
        fix="; or ".join(ways),
        keys=(KEY,),
        rule="disk-plan",
        exit_code=3,
    )


def _without(plan: RunPlan, space: NodeSpace, room: Room) -> Iterator[str]:
    """Leave the directories of this filesystem out, if the others have room for all."""
    kept = [mount for mount in space.mounts if mount.device != room.mount.device]
    rooms = _rooms(plan, replace(space, mounts=kept))
    if rooms and all(other.state_bytes(plan) <= other.state_room for other in rooms):
        yield f"{KEY}={as_word([str(mount.directory) for mount in kept])}"


def _other_mounts(space: NodeSpace, room: Room, disk_bytes: int) -> Iterator[str]:
    used = {mount.mount_point for mount in space.mounts}
    roomy = [
        other for other in space.others if other.mount_point not in used and other.free_bytes >= disk_bytes
    ]
    if roomy and room.state_room > 0:
        best = max(roomy, key=lambda other: other.free_bytes)
        root = best.mount_point.rstrip("/")
        yield f"{KEY}={root}/muon_offload ({best.kind}, {format_bytes(best.free_bytes)} free)"


def _more_nodes(plan: RunPlan, room: Room) -> Iterator[str]:
    """Each node holds its share of the state as long as data-parallel ranks take parameters from others."""
    state = sum(node.disk_bytes for node in plan.nodes)
    most = room.state_room * room.count // len(room.positions)
    # No rank can hold less than its largest parameter, so there is an end to it.
    if plan.largest is not None and most >= plan.largest.state_bytes:
        nodes = math.ceil(state / most)
        if nodes > len(plan.nodes):
            share = format_bytes(state / nodes)
            yield f"launcher.nodes={nodes} at the same parallel sizes (about {share} a node)"


def _smaller_fraction(
    settings: OffloadSettings, replan: Callable[[OffloadSettings], RunPlan], room: Room
) -> Iterator[str]:
    low, high = 0, math.ceil(settings.fraction * 100)
    while high - low > 1:
        middle = (low + high) // 2
        fits = room.state_bytes(replan(replace(settings, fraction=middle / 100))) <= room.state_room
        low, high = (middle, high) if fits else (low, middle)
    if low > 0:
        heaviest = max(kind.figures.gpu_bytes for kind in replan(replace(settings, fraction=low / 100)).kinds)
        yield f"offload.fraction={low / 100:.2f} (keeps {format_bytes(heaviest)} a rank on the device)"


def _more_memory(
    plan: RunPlan,
    space: NodeSpace,
    settings: OffloadSettings,
    replan: Callable[[OffloadSettings], RunPlan],
    room: Room,
) -> Iterator[str]:
    """Find the smallest budget in GiB whose chunks leave a disk part that fits."""
    node = plan.heaviest_node
    ranks = sum(len(kind.ranks) for kind in plan.kinds) // len(plan.nodes)
    most = ((space.headroom_bytes or 0) - node.staging_bytes) // GIB

    def fits(gib: int) -> bool:
        own = replace(settings, host_bytes=gib * GIB // ranks)
        return room.state_bytes(replan(own)) <= room.state_room

    if settings.engine == "host" or most < 1 or not fits(most):
        return
    low, high = settings.host_bytes * ranks // GIB, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    yield f"offload.host_memory_gb={high}"


def _no_memory(plan: RunPlan, headroom: int, host: int, settings: OffloadSettings) -> Problem:
    node = plan.heaviest_node
    has = f"and this job may still take {format_bytes(headroom)}"
    if settings.engine == "host":
        fix = "offload.engine=disk"
    elif node.host_bytes:
        most = max(0, headroom - node.staging_bytes) // GIB
        fix = f"offload.host_memory_gb={most}"
    else:
        fix = "lower offload.staging_mb"
    return Problem(
        what=f"node {node.node} needs {format_bytes(host)} of host memory for state and staging, {has}.",
        fix=fix,
        keys=("offload.host_memory_gb", "offload.staging_mb"),
        rule="disk-plan",
        exit_code=3,
    )
