"""How much host memory a run may hold for good: the value of ``offload.host_memory_gb=auto``."""

from __future__ import annotations

from dataclasses import dataclass

from muon_offload_cli.machine.memory import HostMemory
from muon_offload_cli.units import GIB, format_bytes

NODE_RESERVE_BYTES = 2 * GIB
"""Left for the system and the page cache of data and logs."""

RANK_RESERVE_BYTES = 4 * GIB
"""Left for each rank itself: the launcher and one rank without state in host memory took 2.7 to 2.9 GB of
anonymous memory on a GPU (docs/lab-log.md); the rest is room for checkpoints and larger data loaders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """What ``auto`` took.

    Attributes:
        budget_bytes: Host memory of this node that may hold state for good, for all its ranks together.
        reserve_bytes: What everything else needs, staging rings included.
        headroom_bytes: What could be had in all.
        limit_bytes: The control group's limit that bounds it, None if the machine's memory does.
    """

    budget_bytes: int
    reserve_bytes: int
    headroom_bytes: int
    limit_bytes: int | None

    def explain(self) -> str:
        """Say in one line what was taken and what was left."""
        bound = f" under a limit of {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        left = self.headroom_bytes - self.budget_bytes
        short = f", which want {format_bytes(self.reserve_bytes)}" if left < self.reserve_bytes else ""
        return (
            f"{format_bytes(self.budget_bytes)} of the {format_bytes(self.headroom_bytes)} to be had{bound}; "
            f"{format_bytes(left)} left for the ranks themselves{short}"
        )


def host_budget(memory: HostMemory, *, ranks: int, staging_bytes: int, device_bytes: int = 0) -> HostBudget:
    """Decide the budget of this node. Pure.

    Args:
        memory: The machine's figures, before the ranks start.
        ranks: Processes of this node.
        staging_bytes: Staging ring of each.
        device_bytes: What all of them would hold on GPUs and, on CPUs, hold in host memory too.
    """
    reserve = NODE_RESERVE_BYTES + ranks * (RANK_RESERVE_BYTES + staging_bytes) + device_bytes
    return HostBudget(
        budget_bytes=max(0, memory.headroom_bytes - reserve),
        reserve_bytes=reserve,
        headroom_bytes=memory.headroom_bytes,
        limit_bytes=memory.limit_bytes,
    )
