"""What ``offload.host_memory_gb=auto`` takes, and what it leaves."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.machine.budget import NODE_RESERVE_BYTES, RANK_RESERVE_BYTES, host_budget
from muon_offload_cli.machine.memory import of_size
from muon_offload_cli.units import GIB, MIB


def test_a_limit_of_16_gib_leaves_a_rank_its_own_memory() -> None:
    memory = replace(of_size(128 * GIB), limit_bytes=16 * GIB, headroom_bytes=16 * GIB)
    budget = host_budget(memory, ranks=1, staging_bytes=192 * MIB)
    assert budget.reserve_bytes == NODE_RESERVE_BYTES + RANK_RESERVE_BYTES + 192 * MIB
    assert budget.budget_bytes == 16 * GIB - budget.reserve_bytes
    assert "9.81 GiB of the 16.00 GiB to be had under a limit of 16.00 GiB" in budget.explain()


@given(
    headroom=st.integers(0, 2**42),
    ranks=st.integers(1, 16),
    staging=st.integers(0, 2**32),
    device=st.integers(0, 2**40),
)
def test_budget_and_reserve_never_exceed_what_there_is(
    headroom: int, ranks: int, staging: int, device: int
) -> None:
    budget = host_budget(of_size(headroom), ranks=ranks, staging_bytes=staging, device_bytes=device)
    assert budget.budget_bytes >= 0
    assert budget.reserve_bytes > ranks * staging + device
    assert budget.budget_bytes == 0 or budget.budget_bytes + budget.reserve_bytes == headroom


def test_what_is_left_is_what_there_is_where_the_ranks_want_more() -> None:
    memory = replace(of_size(128 * GIB), limit_bytes=1500 * MIB, headroom_bytes=1464 * MIB)
    assert host_budget(memory, ranks=4, staging_bytes=192 * MIB).explain() == (
        "0 B of the 1.43 GiB to be had under a limit of 1.46 GiB; 1.43 GiB left for the ranks themselves, "
        "which want 18.75 GiB"
    )
