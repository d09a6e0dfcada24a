"""Collecting Adam's state for a checkpoint; tests/end_to_end/test_saving_costs.py saves and loads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from muon_offload_cli.megatron.adam_state import collect_one_at_a_time
from muon_offload_cli.megatron.substitute import Substitutions

PARAMETER = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
WHOLE = torch.linspace(-1, 1, 12).copysign(torch.tensor(-1.0))
WHOLE[5] = -0.0
"""A minus zero, which plain addition would turn into zero."""

START = 100


def optimizer(ranks: int, begin: int, end: int) -> Any:
    """One rank's optimizer, with elements `begin` to `end` of `PARAMETER`."""
    part = {"param": SimpleNamespace(start=begin, end=end)}
    shard = WHOLE[begin:end].clone()
    return SimpleNamespace(
        gbuf_ranges=[{torch.bfloat16: [{"param_map": {PARAMETER: part}}]}],
        buffers=[SimpleNamespace(param_index_map={PARAMETER: (START, START + 12, 0)}, numel_unpadded=112)],
        data_parallel_group=SimpleNamespace(size=lambda: ranks),
        optimizer_state_keys=("exp_avg",),
        _get_main_param_and_optimizer_states=lambda _: {"param": shard, "exp_avg": shard},
    )


def collected(given: Any, *, empty: bool = False) -> torch.Tensor:
    with Substitutions() as stack:
        collect_one_at_a_time(stack)
        state = DistributedOptimizer.get_parameter_state_dp_zero(
            given, use_gloo_comm=False, empty_data=empty, return_on_all_ranks=True
        )
    assert set(state[0][torch.bfloat16]) == {"param", "exp_avg", "numel_unpadded"}
    found: torch.Tensor = state[0][torch.bfloat16]["exp_avg"][START : START + 12]
    return found


@pytest.fixture
def other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank, which has the last eight elements."""

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        theirs = torch.zeros(12)
        theirs[4:] = WHOLE[4:]
        tensor += theirs.view(torch.int32)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("empty", [False, True])
def test_state_that_no_rank_shares_is_handed_out_itself(empty: bool) -> None:
    given = optimizer(1, 0, 12)
    found = collected(given, empty=empty)
    assert found.data_ptr() == given._get_main_param_and_optimizer_states(PARAMETER)["exp_avg"].data_ptr()


@pytest.mark.usefixtures("other_half")
def test_parts_of_several_ranks_are_put_together_bit_for_bit() -> None:
    assert bits(collected(optimizer(2, 0, 4))) == bits(WHOLE)


@pytest.mark.usefixtures("other_half")
def test_a_device_without_room_leaves_it_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def full(*args: Any, device: torch.device | None = None, **kwargs: Any) -> torch.Tensor:
        if device is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", full)
    assert bits(collected(optimizer(2, 0, 4))) == bits(WHOLE)


def test_memory_of_a_load_holds_a_whole_parameter() -> None:
    assert collected(optimizer(2, 0, 4), empty=True).shape == WHOLE.shape
