"""From the config's units to one rank's offload settings, for the run and for the plan alike."""

from __future__ import annotations

import math
from pathlib import Path

from muon_offload_cli.config.schema import Config
from muon_offload_cli.offload.directories import directories_of
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.units import GIB, MIB


def offload_settings(config: Config, *, local_rank: int = 0) -> OffloadSettings:
    """Turn the config's units into one rank's settings; a node's budget is shared by its ranks.

    ``offload.host_memory_gb`` must be a number by now (the commands replace ``auto``).

    Args:
        config: Resolved config.
        local_rank: The rank's number on its node, which chooses its directory where ranks are spread.
    """
    offload, ranks = config.offload, config.launcher.ranks_per_node
    directories = [Path(directory) for directory in offload.directory or ()]
    return OffloadSettings(
        engine=offload.engine.name,
        directories=directories_of(directories, ranks=ranks, local_rank=local_rank),
        # Rounded up: 0 bytes would mean one chunk of everything.
        chunk_bytes=math.ceil(offload.chunk_mb * MIB),
        fraction=offload.fraction,
        host_bytes=round((offload.host_memory_gib or 0) * GIB) // ranks,
        windows=offload.windows,
        io_threads=offload.io_threads,
        staging_bytes=round(offload.staging_mb * MIB),
        verify=offload.verify.name,
    )
