"""Does the plan fit this machine? Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muon_offload_cli.config.rules.chunks import ON_GPUS
from muon_offload_cli.config.rules.directory import KEY
from muon_offload_cli.errors import Problem
from muon_offload_cli.machine.filesystem import Mount
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.planner.plan import RunPlan
from muon_offload_cli.planner.space import NodeSpace, Room
from muon_offload_cli.planner.ways import Replan, ways_to_fit
from muon_offload_cli.units import GIB, format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The verdict.

    Attributes:
        needed_bytes: What ranks of the fullest machine reserve in the offload directories.
        checkpoint_bytes: What this machine's part of the checkpoints takes on the same filesystems, beside
            what an interrupted save left there.
        free_bytes: What is free there; None if no directory is used or nothing is known of it.
        rooms: The filesystems, each once.
        saved_on: The filesystem of the checkpoints if no offload directory is on it; None: it is, or none is
            known.
        saved_bytes: What they take there, counted so too.
        host_needed_bytes: Host memory for state and staging.
        headroom_bytes: Host memory that there is; None: not known.
        problems: Why it does not fit, each with what would make it fit; empty if it fits.
    """

    needed_bytes: int
    checkpoint_bytes: int
    free_bytes: int | None
    rooms: tuple[Room, ...]
    saved_on: Mount | None
    saved_bytes: int
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


def judge_fit(
    plan: RunPlan,
    space: NodeSpace,
    settings: OffloadSettings,
    replan: Replan,
) -> Fit:
    """Compare a plan with a machine.

    Args:
        plan: The plan under `settings`.
        space: What the machine has.
        settings: Of one rank.
        replan: See `Replan`; computes what would fit.
    """
    node = plan.heaviest_node
    rooms = space.rooms(plan)
    saved_on, saved_bytes = space.checkpoint_mount, space.checkpoint_bytes(plan)
    if saved_on is not None and saved_on.device in {each.device for each in space.mounts}:
        saved_on = None
    host = plan.host_bytes
    problems = [
        _no_room(plan, room, ways_to_fit(plan, space, room, settings, replan))
        for room in rooms
        if room.state_bytes(plan) > room.state_room
    ]
    if saved_on is not None and saved_bytes > saved_on.free_bytes:
        problems.append(_no_room_for_checkpoints(plan, space, saved_on, saved_bytes))
    if space.headroom_bytes is not None and host > space.headroom_bytes:
        problems.append(_no_memory(plan, space.headroom_bytes, host, settings))
    return Fit(
        needed_bytes=node.disk_bytes,
        checkpoint_bytes=sum(room.checkpoint_bytes for room in rooms),
        free_bytes=sum(room.mount.free_bytes for room in rooms) if rooms else None,
        rooms=rooms,
        saved_on=saved_on,
        saved_bytes=saved_bytes,
        host_needed_bytes=host,
        headroom_bytes=space.headroom_bytes,
        problems=tuple(problems),
    )


def _no_room(plan: RunPlan, room: Room, ways: Iterable[str]) -> Problem:
    mount, checkpoints = room.mount, room.checkpoint_bytes
    needed = room.state_bytes(plan) + checkpoints
    parts = f" ({format_bytes(checkpoints)} of it checkpoints)" if checkpoints else ""
    return Problem(
        what=f"node {room.fullest(plan).node} needs {format_bytes(needed)}{parts} on {mount.mount_point} "
        f"({mount.kind}), which has {format_bytes(mount.free_bytes)} free ({KEY}={room.names}).",
        fix="; or ".join(ways),
        keys=(KEY,),
        rule="disk-plan",
        exit_code=3,
    )


def _no_room_for_checkpoints(plan: RunPlan, space: NodeSpace, mount: Mount, needed: int) -> Problem:
    key, short = "checkpoint.directory", format_bytes(needed - mount.free_bytes)
    keep = space.keep_within(plan, mount.free_bytes)
    larger = f"free {short} on {mount.mount_point}, or set {key} to a larger filesystem"
    return Problem(
        what=f"checkpoints need {format_bytes(needed)} on {mount.mount_point} ({mount.kind}), which has "
        f"{format_bytes(mount.free_bytes)} free ({key}={mount.directory}).",
        fix=f"checkpoint.keep={keep}" if keep else larger,
        keys=(key,),
        rule="disk-plan",
        exit_code=3,
    )


def _no_memory(plan: RunPlan, headroom: int, host: int, settings: OffloadSettings) -> Problem:
    node, fixed = plan.heaviest_node, plan.fixed_host_bytes(plan.heaviest_node)
    has = f"and this job may still take {format_bytes(headroom)}"
    if plan.on_cpu and node.device_bytes > headroom:
        fix = ON_GPUS
    elif settings.engine == "host":
        fix = "offload.engine=disk"
    elif fixed <= headroom:
        fix = f"offload.host_memory_gb={(headroom - fixed) // GIB}"
    else:
        fix = "lower offload.staging_mb"
    return Problem(
        what=f"node {node.node} needs {format_bytes(host)} of host memory for "
        f"{'all that ranks on CPUs hold' if plan.on_cpu else 'state and staging'}, {has}.",
        fix=fix,
        keys=("offload.host_memory_gb", "offload.staging_mb"),
        rule="disk-plan",
        exit_code=3,
    )
