"""Does the plan fit this machine, and what would make it fit: computed with the same planner. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem
from muon_offload_cli.machine.filesystem import Mount
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.planner.plan import RunPlan
from muon_offload_cli.units import GIB, format_bytes

KEY = "offload.directory"

TB = 10**12
"""Drives are sold in powers of ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a machine has for the state of its ranks.

    Attributes:
        mount: Filesystem of the offload directory; None if no engine uses one, or nothing is known of it.
        others: Other filesystems of the machine that this user may write to.
        headroom_bytes: Host memory that the job could still take; None: not known.
        checkpoints_here: Checkpoints that this run will leave on the same filesystem.
    """

    mount: Mount | None
    others: Sequence[Mount]
    headroom_bytes: int | None
    checkpoints_here: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The verdict.

    Attributes:
        needed_bytes: What ranks of the fullest machine reserve in the offload directory.
        checkpoint_bytes: What this machine's part of the checkpoints takes on the same filesystem.
        free_bytes: What is free there; None if no directory is used or nothing is known of it.
        host_needed_bytes: Host memory for state and staging.
        headroom_bytes: Host memory that there is; None: not known.
        problems: Why it does not fit, each with what would make it fit; empty if it fits.
    """

    needed_bytes: int
    checkpoint_bytes: int
    free_bytes: int | None
    host_needed_bytes: int
    headroom_bytes: int | None
    problems: tuple[Problem, ...]

    @property
    def peak_bytes(self) -> int:
        """What the offload directory's filesystem holds when the last checkpoint is written."""
        return self.needed_bytes + self.checkpoint_bytes

    @property
    def fits(self) -> bool:
        """Nothing stands in the way."""
        return not self.problems


def cluster_place(config: Config) -> Place:
    """Return what a node of the cluster that the recipe names has, as far as its file says."""
    cluster = config.cluster
    mount = None
    if cluster.drives and cluster.drive_tb:
        total = round(cluster.drives * cluster.drive_tb * TB)
        mount = Mount(
            directory=Path(config.offload.directory or "/"),
            existing=Path("/"),
            mount_point=f"a node of cluster={cluster.name}",
            kind=f"{cluster.drives} drives",
            is_memory=False,
            is_network=False,
            total_bytes=total,
            free_bytes=total,
            writable=True,
        )
    memory = None if cluster.host_memory_gb is None else round(cluster.host_memory_gb * GIB)
    return Place(mount=mount, others=(), headroom_bytes=memory)


def judge_fit(
    plan: RunPlan,
    place: Place,
    settings: OffloadSettings,
    replan: Callable[[OffloadSettings], RunPlan],
) -> Fit:
    """Compare a plan with a machine.

    Args:
        plan: The plan under `settings`.
        place: What the machine has.
        settings: Of one rank.
        replan: Plans the same model under other settings, to compute what would fit.
    """
    node = plan.heaviest_node
    needed = node.disk_bytes
    checkpoints = place.checkpoints_here * math.ceil(plan.checkpoint_bytes / len(plan.nodes))
    host = node.host_bytes + node.staging_bytes
    problems = []
    if place.mount and needed + checkpoints > place.mount.free_bytes:
        problems.append(_no_room(plan, place, place.mount, checkpoints, settings, replan))
    if place.headroom_bytes is not None and host > place.headroom_bytes:
        problems.append(_no_memory(plan, place.headroom_bytes, host, settings))
    return Fit(
        needed_bytes=needed,
        checkpoint_bytes=checkpoints if place.mount else 0,
        free_bytes=place.mount.free_bytes if place.mount else None,
        host_needed_bytes=host,
        headroom_bytes=place.headroom_bytes,
        problems=tuple(problems),
    )


def _no_room(
    plan: RunPlan,
    place: Place,
    mount: Mount,
    checkpoints: int,
    settings: OffloadSettings,
    replan: Callable[[OffloadSettings], RunPlan],
) -> Problem:
    node = plan.heaviest_node
    needed = node.disk_bytes + checkpoints
    parts = f" ({format_bytes(checkpoints)} of it checkpoints)" if checkpoints else ""
    room = mount.free_bytes - checkpoints
    ways = [f"free {format_bytes(needed - mount.free_bytes)} on {mount.mount_point}"]
    ways += _other_mounts(place.others, mount, node.disk_bytes, checkpoints)
    ways += _more_nodes(plan, room)
    if room > 0:
        ways += _smaller_fraction(settings, replan, room)
        ways += _more_memory(plan, place, settings, replan, room)
    return Problem(
        what=f"node {node.node} needs {format_bytes(needed)}{parts} on {mount.mount_point} ({mount.kind}), "
        f"which has {format_bytes(mount.free_bytes)} free ({KEY}={mount.directory}).",
        fix="; or ".join(ways),
        keys=(KEY,),
        rule="disk-plan",
        exit_code=3,
    )


def _other_mounts(others: Sequence[Mount], mount: Mount, disk_bytes: int, checkpoints: int) -> Iterator[str]:
    roomy = [
        other for other in others if other.mount_point != mount.mount_point and other.free_bytes >= disk_bytes
    ]
    if roomy and checkpoints < mount.free_bytes:
        best = max(roomy, key=lambda other: other.free_bytes)
        root = best.mount_point.rstrip("/")
        yield f"{KEY}={root}/muon_offload ({best.kind}, {format_bytes(best.free_bytes)} free)"


def _more_nodes(plan: RunPlan, room: int) -> Iterator[str]:
    """Each node holds its share of the state as long as data-parallel ranks take parameters from others."""
    state = sum(node.disk_bytes for node in plan.nodes)
    # No rank can hold less than its largest parameter, so there is an end to it.
    if plan.largest is not None and room >= plan.largest.state_bytes:
        nodes = math.ceil(state / room)
        if nodes > len(plan.nodes):
            share = format_bytes(state / nodes)
            yield f"launcher.nodes={nodes} at the same parallel sizes (about {share} a node)"


def _smaller_fraction(
    settings: OffloadSettings, replan: Callable[[OffloadSettings], RunPlan], room: int
) -> Iterator[str]:
    low, high = 0, math.ceil(settings.fraction * 100)
    while high - low > 1:
        middle = (low + high) // 2
        fits = replan(replace(settings, fraction=middle / 100)).heaviest_node.disk_bytes <= room
        low, high = (middle, high) if fits else (low, middle)
    if low > 0:
        heaviest = max(kind.figures.gpu_bytes for kind in replan(replace(settings, fraction=low / 100)).kinds)
        yield f"offload.fraction={low / 100:.2f} (keeps {format_bytes(heaviest)} a rank on the device)"


def _more_memory(
    plan: RunPlan,
    place: Place,
    settings: OffloadSettings,
    replan: Callable[[OffloadSettings], RunPlan],
    room: int,
) -> Iterator[str]:
    """Find the smallest budget in GiB whose chunks leave a disk part that fits."""
    node = plan.heaviest_node
    ranks = sum(len(kind.ranks) for kind in plan.kinds) // len(plan.nodes)
    most = ((place.headroom_bytes or 0) - node.staging_bytes) // GIB

    def fits(gib: int) -> bool:
        own = replace(settings, host_bytes=gib * GIB // ranks)
        return replan(own).heaviest_node.disk_bytes <= room

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
