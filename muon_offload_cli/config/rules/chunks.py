"""How much state leaves the device, in which pieces."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.family import is_muon
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import in_range
from muon_offload_cli.config.schema import Config, Device, Engine, OffloadConfig
from muon_offload_cli.errors import Level, Problem
from muon_offload_cli.units import GIB, MIB, PIECE_BYTES, counted, format_bytes

DEFAULTS = OffloadConfig()
REQUEST_MB = PIECE_BYTES // MIB
ON_GPUS = "a machine with GPUs or more memory, or train --rehearse: the same layers, small, on CPU ranks"


@rule(name="chunk-size", reason="A chunk is a number of MiB.")
def chunk_size(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse negative and infinite chunk sizes."""
    chunk_mb = config.offload.chunk_mb
    if not in_range(chunk_mb, 0):
        yield Problem(
            what=f"offload.chunk_mb={chunk_mb:g} is no size: it must be 0 or more and below 2**31.",
            fix=f"offload.chunk_mb={DEFAULTS.chunk_mb}",
            keys=("offload.chunk_mb",),
        )


@rule(name="chunking-off", reason="Without chunks all state returns to the device at once; no peak is saved.")
def chunking_off(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of ``chunk_mb=0``."""
    if config.offload.engine is not Engine.none and config.offload.chunk_mb == 0:
        yield Problem(
            what="offload.chunk_mb=0: the whole state returns to the device at once, so its peak memory "
            "is not lowered.",
            fix=f"offload.chunk_mb={DEFAULTS.chunk_mb}",
            keys=("offload.chunk_mb",),
            level=Level.WARNING,
        )


@rule(name="fraction-range", reason="The fraction is a part of the state's bytes.")
def fraction_range(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse fractions outside 0 to 1."""
    if not 0 <= config.offload.fraction <= 1:
        yield Problem(
            what=f"offload.fraction={config.offload.fraction:g} is outside 0 to 1.",
            fix="offload.fraction=1.0",
            keys=("offload.fraction",),
        )


@rule(name="fraction-zero", reason="An engine that moves nothing is a run that quietly stays in memory.")
def fraction_zero(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse ``fraction=0`` with an engine."""
    if config.offload.engine is not Engine.none and config.offload.fraction == 0:
        yield Problem(
            what=f"offload.fraction=0 with offload.engine={config.offload.engine.name}: "
            "nothing would be offloaded.",
            fix="offload.fraction=1.0",
            keys=("offload.fraction", "offload.engine"),
        )


@rule(name="windows", reason="One window on the device leaves no place to read ahead.")
def windows(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of a single window."""
    if config.offload.engine is not Engine.none and config.offload.windows == 1:
        yield Problem(
            what="offload.windows=1: no chunk can be read while another is stepped.",
            fix="offload.windows=3",
            keys=("offload.windows",),
            level=Level.WARNING,
        )


@rule(name="host-memory", reason="The host-memory budget is a number of GiB, or auto.")
def host_memory(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a budget that is neither."""
    value = config.offload.host_memory_gib
    if value is not None and not in_range(value, 0):
        yield Problem(
            what=f"offload.host_memory_gb={config.offload.host_memory_gb[:80]} is neither a number of GiB "
            "nor auto.",
            fix="offload.host_memory_gb=auto",
            keys=("offload.host_memory_gb",),
        )


def _on_device(config: Config, facts: MachineFacts) -> int:
    """Return what ranks on CPUs hold in host memory for want of a device's own."""
    return facts.planned.device_bytes if config.device is Device.cpu else 0


def _needed(config: Config, facts: MachineFacts) -> int | None:
    held = facts.planned.host_bytes
    return None if held is None else held + _on_device(config, facts)


def _held(config: Config, facts: MachineFacts) -> str:
    parts = {"staging rings": facts.planned.staging_bytes, "for want of a GPU": _on_device(config, facts)}
    shown = ", ".join(f"{format_bytes(size)} of it {name}" for name, size in parts.items() if size)
    held = format_bytes(_needed(config, facts) or 0) + f" ({shown})" * bool(shown)
    return f"{counted(config.launcher.ranks_per_node, 'rank')} would hold {held} in host memory"


def _held_less(config: Config, facts: MachineFacts, room: int) -> str:
    """Name what to lower: the rings if they alone are too large, else the budget."""
    room -= _on_device(config, facts)
    rings = min(
        facts.planned.staging_bytes, round(config.launcher.ranks_per_node * DEFAULTS.staging_mb * MIB)
    )
    if config.device is Device.cpu and room < rings:
        return ON_GPUS
    if config.offload.engine is Engine.host:
        return "offload.engine=disk"
    if facts.planned.staging_bytes <= room:
        return "offload.host_memory_gb=0"
    share = room // config.launcher.ranks_per_node // MIB
    return f"offload.staging_mb={max(2 * REQUEST_MB, min(DEFAULTS.staging_mb, share))}"


def on_cpus(config: Config, facts: MachineFacts) -> str:
    """Return the words that turn a run on GPUs into one on CPUs, or what else there is if it is too large."""
    planned, room = facts.planned, facts.headroom_bytes
    if room is not None and (planned.host_bytes or 0) + planned.device_bytes > room:
        return ON_GPUS
    moe = config.model.moe
    return "device=cpu" + " model.moe.grouped_gemm=false" * (moe.num_experts is not None and moe.grouped_gemm)


@rule(name="host-fits", reason="The kernel kills a rank that takes more memory than its node has.")
def host_fits(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse state, and on CPUs all that ranks hold, in host memory that the cluster's nodes do not have."""
    has_gb, needed = config.cluster.host_memory_gb, _needed(config, facts)
    if has_gb is None or needed is None or not in_range(has_gb, 0) or needed <= has_gb * GIB:
        return
    yield Problem(
        what=f"{_held(config, facts)}, and a node of cluster={config.cluster.name} has "
        f"{format_bytes(has_gb * GIB)}.",
        fix=_held_less(config, facts, round(has_gb * GIB)),
        keys=("offload.host_memory_gb", "offload.staging_mb", "offload.engine", "cluster.host_memory_gb"),
        exit_code=3,
    )


@rule(
    name="host-headroom",
    reason="What other processes hold and a control group's limit count as well as the memory installed.",
    machine=True,
)
def host_headroom(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse state, and on CPUs all that ranks hold, beyond what this machine can still give."""
    room, needed = facts.headroom_bytes, _needed(config, facts)
    if room is None or needed is None or needed <= room:
        return
    limit = facts.memory_limit_bytes
    under = f" under its control group's limit of {format_bytes(limit)}" if limit else ""
    yield Problem(
        what=f"{_held(config, facts)}, and this machine can still give {format_bytes(room)}{under}.",
        fix=_held_less(config, facts, room),
        keys=("offload.host_memory_gb", "offload.staging_mb", "offload.engine"),
        exit_code=3,
    )


@rule(
    name="chunk-parameter",
    reason="A parameter is never cut, so a smaller chunk holds one parameter and windows grow to it.",
)
def chunk_parameter(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of chunks smaller than the state of the largest parameter, by name and size."""
    chunk_mb = config.offload.chunk_mb
    if config.offload.engine is Engine.none or not is_muon(config.optimizer) or not in_range(chunk_mb, 0):
        return
    largest = facts.planned.largest_parameter
    if largest is not None and 0 < chunk_mb * MIB < largest.state_bytes:
        shape = " x ".join(map(str, largest.shape))
        yield Problem(
            what=f"offload.chunk_mb={chunk_mb:g} is smaller than the state of {largest.name} ({shape}, "
            f"{format_bytes(largest.state_bytes)}): such chunks hold one parameter.",
            fix=f"offload.chunk_mb={-(-largest.state_bytes // MIB)}",
            keys=("offload.chunk_mb",),
            level=Level.WARNING,
        )


@rule(
    name="staging", reason="Reading and writing each need one staging buffer of the size of a disk request."
)
def staging(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a staging ring with less room than two disk requests (offload/settings.py, staging_rings)."""
    offload = config.offload
    if offload.engine is not Engine.disk or not in_range(offload.staging_mb, 0) or offload.staging_mb <= 0:
        return
    request_mb = (
        min(REQUEST_MB, offload.chunk_mb)
        if in_range(offload.chunk_mb, 0) and offload.chunk_mb
        else REQUEST_MB
    )
    if offload.staging_mb < 2 * request_mb:
        yield Problem(
            what=f"offload.staging_mb={offload.staging_mb:g} is less than two disk requests "
            f"of {request_mb:g} MiB.",
            fix=f"offload.staging_mb={2 * REQUEST_MB}",
            keys=("offload.staging_mb", "offload.chunk_mb"),
        )
