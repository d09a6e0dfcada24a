"""What would make a plan fit that does not: computed with the same planner. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from muon_offload_cli.config.rules.directory import KEY, one_or_several
from muon_offload_cli.errors import override
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.planner.plan import RunPlan
from muon_offload_cli.planner.space import NodeSpace, Room
from muon_offload_cli.units import GIB, format_bytes

Replan = Callable[[OffloadSettings], RunPlan]
"""Plans the same model under other settings."""


def ways_to_fit(
    plan: RunPlan, space: NodeSpace, room: Room, settings: OffloadSettings, replan: Replan
) -> Iterator[str]:
    """Yield what would give the state room, as words that can be pasted where there are such.

    Args:
        plan: The plan under `settings`.
        space: What the machine has.
        room: The filesystem that is too small.
        settings: Of one rank.
        replan: See `Replan`.
    """
    short = room.state_bytes(plan) - room.state_room
    yield f"free {format_bytes(short)} on {room.mount.mount_point}"
    yield from _fewer_checkpoints(plan, space, room)
    yield from _without(plan, space, room)
    yield from _other_mounts(space, room, room.fullest(plan).disk_bytes)
    yield from _more_nodes(plan, room)
    if room.state_room > 0:
        yield from _smaller_fraction(settings, replan, room)
        yield from _more_memory(plan, space, settings, replan, room)


def _fewer_checkpoints(plan: RunPlan, space: NodeSpace, room: Room) -> Iterator[str]:
    # State is reserved before a save frees anything.
    spare = room.mount.free_bytes - room.state_bytes(plan)
    if room.checkpoint_bytes and spare >= 0 and (keep := space.keep_within(plan, spare)):
        yield f"checkpoint.keep={keep}"


def _without(plan: RunPlan, space: NodeSpace, room: Room) -> Iterator[str]:
    """Leave the directories of this filesystem out, if the others have room for all."""
    kept = [mount for mount in space.mounts if mount.device != room.mount.device]
    rooms = replace(space, mounts=kept).rooms(plan)
    if rooms and all(other.state_bytes(plan) <= other.state_room for other in rooms):
        yield override(KEY, one_or_several([str(mount.directory) for mount in kept]))


def _other_mounts(space: NodeSpace, room: Room, disk_bytes: int) -> Iterator[str]:
    used = {mount.mount_point for mount in space.mounts}
    roomy = [
        other for other in space.others if other.mount_point not in used and other.free_bytes >= disk_bytes
    ]
    if roomy and room.state_room > 0:
        best = max(roomy, key=lambda other: other.free_bytes)
        root = best.mount_point.rstrip("/")
        word = override(KEY, f"{root}/muon_offload")
        yield f"{word} ({best.kind}, {format_bytes(best.free_bytes)} free)"


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


def _smaller_fraction(settings: OffloadSettings, replan: Replan, room: Room) -> Iterator[str]:
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
    replan: Replan,
    room: Room,
) -> Iterator[str]:
    """Find the smallest budget in GiB whose chunks leave a disk part that fits."""
    node = plan.heaviest_node
    ranks = sum(len(kind.ranks) for kind in plan.kinds) // len(plan.nodes)
    most = ((space.headroom_bytes or 0) - plan.fixed_host_bytes(node)) // GIB

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
