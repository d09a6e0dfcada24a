"""Train Megatron models with Muon's optimizer state on node-local NVMe.

From a training program of one's own, before the optimizer is built::

    import muon_offload_cli

    muon_offload_cli.install(directory="/nvme/muon", engine="disk", chunk_mb=512)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muon_offload_cli.megatron.attach import Installation
    from muon_offload_cli.megatron.native_installation import NativeInstallation

__all__ = ["install"]


def install(
    *,
    directory: str | Path | Sequence[str | Path] | None = None,
    engine: str = "disk",
    chunk_mb: float = 512,
    fraction: float = 1.0,
    host_memory_gb: float = 0,
    ranks_per_node: int | None = None,
    windows: int = 3,
) -> Installation | NativeInstallation:
    """Let every Muon optimizer that Megatron builds in this process from now on offload its state.

    Call it on each rank before Megatron's optimizer is built. It replaces one name in
    ``megatron.core.optimizer.layer_wise_optimizer``; Megatron's files stay untouched. No launcher and no
    process group is needed yet. The same call again changes nothing and returns the same installation.

    A process may build several optimizers, a policy's and a critic's say: each has a file and threads of its
    own, and they share the host memory in the order in which they are built. An optimizer that the program
    drops gives back its files and memory; so does ``close``.

    Where Megatron brings a chunked offloader of its own, ``mapped`` maps the buffers of that one from files:
    configs of Muon that ask for no offload are given `chunk_mb` (in whole MiB) and `fraction`, and the other
    settings are not read.

    Args:
        directory: Absolute folder on a node-local drive, for ``mapped`` and ``disk``; created if missing. A
            list of folders, one a drive, shares the state out evenly: ranks are spread over them where
            `ranks_per_node` is a multiple of their number, and each rank's file is striped otherwise.
        engine: ``host``, ``mapped`` or ``disk``.
        chunk_mb: MiB of state that move as one unit; 0: everything at once.
        fraction: Part of the state's bytes that leaves the device, above 0 and at most 1.
        host_memory_gb: GiB of host memory a node that hold state for good before the disk is used.
        ranks_per_node: Processes that share that memory; None: ``LOCAL_WORLD_SIZE`` as torchrun sets it,
            else 1. Where another launcher starts several on a node (Ray, say), give their number.
        windows: Chunks that have a place on the device at the same time.

    Returns:
        The installation. Its ``close`` gives Megatron its class back and releases threads, memory and files;
        a process that ends without it leaves nothing behind either.

    Raises:
        UserError: An argument is wrong (all problems at once), `directory` among them where it cannot hold
            the state (a file, memory, no permission), or differs from those of the installation that the
            process has.
    """
    # Importing this package must stay cheap for the command line: torch comes with the first call.
    from muon_offload_cli.megatron.arguments import make_settings
    from muon_offload_cli.megatron.attach import install as attach

    return attach(
        make_settings(
            directory=directory,
            engine=engine,
            chunk_mb=chunk_mb,
            fraction=fraction,
            host_memory_gb=host_memory_gb,
            ranks_per_node=ranks_per_node,
            windows=windows,
        )
    )
