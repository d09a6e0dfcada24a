"""The chunk plan: which parameters move together, and in which tier each chunk lives between steps.

Pure arithmetic. The plan depends on shapes, order and sizes alone, never on the rank: a tensor-parallel
parameter runs a collective while it is stepped, so all tensor-parallel peers must cut alike.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.units import round_up

STATE_ALIGNMENT = 512
"""Bytes; each tensor inside a chunk starts at a multiple, as torch's own device allocator aligns."""

CHUNK_ALIGNMENT = 4096
"""Bytes; a chunk's size is a multiple, so that O_DIRECT can move it whole."""

STATE_ITEM_BYTES = 4
"""All state is fp32."""


class Tier(enum.Enum):
    """Where a chunk lives between steps."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """What the plan needs to know of one parameter.

    Attributes:
        shape: Local shape on this rank.
        domain: Parameters of different domains never share a chunk; used for those whose collectives run
            in different groups, so that peers of either group cut alike.
        second_moment: Shape of the second moment that an adaptive optimizer keeps; None: there is none.
    """

    shape: tuple[int, ...]
    domain: Hashable = None
    second_moment: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of its master weight, its momentum and, where there is one, its second moment."""
        moment = () if self.second_moment is None else (math.prod(self.second_moment),)
        return tuple(numel * STATE_ITEM_BYTES for numel in (self.numel, self.numel, *moment))


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where one tensor lies inside its chunk, in bytes from the chunk's start."""

    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The unit that moves between tiers: whole parameters up to a byte budget.

    Attributes:
        index: Number in plan order.
        parameters: Indices of its parameters, in optimizer order.
        masters: Place of each parameter's master weight.
        momenta: Place of each parameter's momentum.
        second_moments: Place of each parameter's second moment; empty if the optimizer keeps none.
        nbytes: Size of the chunk's image, a multiple of `CHUNK_ALIGNMENT`.
        tier: Where it lives between steps.
    """

    index: int
    parameters: tuple[int, ...]
    masters: tuple[Slot, ...]
    momenta: tuple[Slot, ...]
    nbytes: int
    tier: Tier
    second_moments: tuple[Slot, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of all state without padding."""
        return sum(slot.nbytes for slot in (*self.masters, *self.momenta, *self.second_moments))

    @property
    def born_bytes(self) -> int:
        """Bytes of the image that masters reach to; what follows is born as zeros."""
        last = self.masters[-1]
        return round_up(max(last.offset + last.nbytes, 1), CHUNK_ALIGNMENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """All chunks of a rank in optimizer order."""

    chunks: tuple[Chunk, ...]

    def of_tier(self, *tiers: Tier) -> tuple[Chunk, ...]:
        """Chunks that live in one of `tiers`, in plan order."""
        return tuple(chunk for chunk in self.chunks if chunk.tier in tiers)

    def bytes_of(self, *tiers: Tier) -> int:
        """Bytes of the images of the chunks in `tiers`, padding included."""
        return sum(chunk.nbytes for chunk in self.of_tier(*tiers))


def plan_for(settings: OffloadSettings, parameters: Sequence[ParameterSpec]) -> ChunkPlan:
    """Return the plan of a rank's parameters, for the run and for what is said of it beforehand alike."""
    return plan_chunks(
        parameters,
        chunk_bytes=settings.chunk_bytes,
        fraction=settings.fraction,
        host_bytes=settings.host_bytes,
        disk=settings.engine != "host",
        windows=settings.windows,
    )


def plan_chunks(
    parameters: Sequence[ParameterSpec],
    *,
    chunk_bytes: int,
    fraction: float,
    host_bytes: int,
    disk: bool,
    windows: int,
) -> ChunkPlan:
    """Cut parameters into chunks and give each chunk a tier.

    Parameters keep their order. Of each domain, the last ``1 - fraction`` of the state's bytes stays on the
    GPU (peers of one domain may own different parts of another, and must still cut alike); the host budget
    is filled with chunks of the rest, and what remains goes to disk. The first and the last chunks go to disk
    first: the windows hold one end or the other from one step to the next, so that each of them moves in
    every second step only. Between the ends, disk and host alternate.

    Args:
        parameters: In the optimizer's order; all with a second moment, or none.
        chunk_bytes: Budget of a chunk; a larger parameter gets a chunk of its own. 0: one chunk a domain.
        fraction: Part of the bytes that leaves the GPU, 0 to 1.
        host_bytes: Host memory of this rank that may hold chunks for good.
        disk: Whether there is a disk tier; without one, all that leaves the GPU goes to the host.
        windows: Chunks that have a place on the device at the same time.

    Returns:
        The plan; every parameter is in exactly one chunk.
    """
    sizes = [_image_bytes(parameter) for parameter in parameters]
    left: Counter[Hashable] = Counter()
    for parameter, size in zip(parameters, sizes, strict=True):
        left[parameter.domain] += size
    leaving = {domain: round(size * fraction) for domain, size in left.items()}
    groups: list[tuple[bool, list[int]]] = []
    filled = 0
    seen: Counter[Hashable] = Counter()
    previous: tuple[Hashable, bool] | None = None
    for index, (parameter, size) in enumerate(zip(parameters, sizes, strict=True)):
        seen[parameter.domain] += size
        leaves = seen[parameter.domain] <= leaving[parameter.domain]
        starts = (parameter.domain, leaves) != previous or (chunk_bytes > 0 and filled + size > chunk_bytes)
        if starts or not groups:
            groups.append((leaves, []))
            filled = 0
        groups[-1][1].append(index)
        filled += size
        previous = (parameter.domain, leaves)
    images = [
        _lay_out(index, members, parameters, Tier.DISK if leaves else Tier.GPU)
        for index, (leaves, members) in enumerate(groups)
    ]
    streamed = [chunk for chunk in images if chunk.tier is Tier.DISK]
    hosted = _hosted(streamed, host_bytes, windows) if disk else {chunk.index for chunk in streamed}
    return ChunkPlan(
        chunks=tuple(replace(chunk, tier=Tier.HOST) if chunk.index in hosted else chunk for chunk in images)
    )


def window_sizes(chunks: Sequence[Chunk], count: int) -> list[int]:
    """Return the bytes of each window; number i of the streamed chunks uses window ``i % count``."""
    count = min(count, len(chunks))
    return [max(chunk.nbytes for chunk in chunks[start::count]) for start in range(count)]


def _image_bytes(parameter: ParameterSpec) -> int:
    return sum(round_up(nbytes, STATE_ALIGNMENT) for nbytes in parameter.sizes)


def _lay_out(index: int, members: list[int], parameters: Sequence[ParameterSpec], tier: Tier) -> Chunk:
    """Place all masters of a chunk, then all its momenta, then all its second moments, each aligned."""
    cursor = 0
    rows: list[tuple[Slot, ...]] = []
    for sizes in zip(*(parameters[member].sizes for member in members), strict=True):
        row = []
        for nbytes in sizes:
            row.append(Slot(offset=cursor, nbytes=nbytes))
            cursor += round_up(nbytes, STATE_ALIGNMENT)
        rows.append(tuple(row))
    return Chunk(
        index=index,
        parameters=tuple(members),
        masters=rows[0],
        momenta=rows[1],
        second_moments=rows[2] if len(rows) > 2 else (),
        # Never empty: the turns of a window are handed over by bytes.
        nbytes=round_up(max(cursor, 1), CHUNK_ALIGNMENT),
        tier=tier,
    )


def _hosted(chunks: Sequence[Chunk], host_bytes: int, windows: int) -> set[int]:
    """Choose chunks for the host tier: between the ends that the windows hold in turn, then the ends too."""
    inner = chunks[windows : len(chunks) - windows]
    chosen = _spread(inner, host_bytes)
    left = host_bytes - sum(chunk.nbytes for chunk in inner if chunk.index in chosen)
    for chunk in chunks:
        if chunk.index not in chosen and chunk.nbytes <= left:
            chosen.add(chunk.index)
            left -= chunk.nbytes
    return chosen


def _spread(chunks: Sequence[Chunk], host_bytes: int) -> set[int]:
    """Choose chunks of up to `host_bytes`, spread over the order so that disk and host alternate.

    Each chunk earns its size in proportion to the part of the bytes that fits and is taken once it has
    earned it, as in Bresenham's line.
    """
    total = sum(chunk.nbytes for chunk in chunks)
    chosen: set[int] = set()
    left, credit = host_bytes, 0.0
    for chunk in chunks:
        credit += chunk.nbytes * min(1.0, host_bytes / total)
        if credit >= chunk.nbytes and chunk.nbytes <= left:
            chosen.add(chunk.index)
            left -= chunk.nbytes
            credit -= chunk.nbytes
    return chosen
