"""From the config's units to one rank's offload settings, for the run and for the plan alike."""

from __future__ import annotations

import math
from pathlib import Path

from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.units import GIB, MIB

AUTO = "auto"

AUTO_SHARE = 0.8
"""Part of the memory that this job could still take that ``offload.host_memory_gb=auto`` gives to state: the
rest is left to staging rings, Python, data and the page cache."""


def offload_settings(config: Config) -> OffloadSettings:
    """Turn the config's units into one rank's settings; a node's budget is shared by its ranks.

    ``offload.host_memory_gb`` must be a number by now, see `resolve_host_memory`.
    """
    offload = config.offload
    return OffloadSettings(
        engine=offload.engine.name,
        directory=None if offload.directory is None else Path(offload.directory),
        # Rounded up: 0 bytes would mean one chunk of everything.
        chunk_bytes=math.ceil(offload.chunk_mb * MIB),
        fraction=offload.fraction,
        host_bytes=round(float(offload.host_memory_gb) * GIB) // config.launcher.ranks_per_node,
        windows=offload.windows,
        io_threads=offload.io_threads,
        staging_bytes=round(offload.staging_mb * MIB),
        verify=offload.verify.name,
    )


def resolve_host_memory(config: Config, headroom_bytes: int) -> Config:
    """Replace ``offload.host_memory_gb=auto`` by a number of GiB; returns the same object.

    Args:
        config: The composed run.
        headroom_bytes: What this machine and its control groups would still give to the job.
    """
    if config.offload.host_memory_gb == AUTO:
        streams = config.offload.engine in (Engine.disk, Engine.mapped)
        config.offload.host_memory_gb = f"{headroom_bytes * AUTO_SHARE / GIB:.2f}" if streams else "0"
    return config
