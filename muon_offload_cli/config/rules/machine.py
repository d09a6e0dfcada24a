"""What the machine at hand has: GPUs, Megatron, and what gathering the facts found out itself."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import Problem


@rule(name="found", reason="A missing or broken installation is told before anything starts.", machine=True)
def found(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Pass on what gathering the facts found: no Megatron, a stub package, nowhere to put state."""
    yield from facts.problems


@rule(name="cuda", reason="device=cuda needs a GPU that torch sees.", machine=True)
def cuda(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse ``device=cuda`` on a machine without CUDA."""
    if config.device is Device.cuda and facts.cuda_available is False:
        yield Problem(
            what="device=cuda, and torch sees no GPU on this machine.",
            fix="device=cpu",
            keys=("device",),
            exit_code=3,
        )


@rule(name="gpus-here", reason="Each rank of this node needs a GPU of its own.", machine=True)
def gpus_here(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse more ranks than this machine has GPUs, unless the run is on CPUs."""
    ranks = config.launcher.ranks_per_node
    if config.device is Device.cpu or not facts.num_gpus or not facts.cuda_available:
        return
    if ranks > facts.num_gpus:
        yield Problem(
            what=f"launcher.ranks_per_node={ranks}, and this machine has {facts.num_gpus} GPUs.",
            fix="device=cpu",
            keys=("launcher.ranks_per_node", "device"),
            exit_code=3,
        )
