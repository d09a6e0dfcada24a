"""Parallel sizes and what follows from them: data-parallel sizes of dense and expert parameters.

Pure arithmetic, shared by the launcher's and the trainer's side. Rank order inside the world is
Megatron's default, tp-cp-ep-dp-pp (``megatron/core/parallel_state.py``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Sizes of the parallel groups of a run; `etp` is expert tensor parallelism."""

    world_size: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int

    @property
    def dp(self) -> int:
        """Data-parallel size of dense parameters."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of expert parameters."""
        return self.world_size // (self.etp * self.ep * self.pp)
