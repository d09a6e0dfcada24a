"""Adam's state for a checkpoint, one parameter at a time and on its own device.

For the fully reshardable format Megatron's `DistributedOptimizer` collects whole buffers in host memory: the
shards of this rank, the buffers put together, and, in its writer, a copy of every parameter's part of them
(`get_parameter_state_dp_zero` in megatron/core/optimizer/distrib_optimizer.py). That is three times Adam's
state, gigabytes for the embeddings of a large vocabulary. Only slices of the buffers are ever asked for, one
parameter's at a time and in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.units import MIB

PIECE_NUMEL = 64 * MIB // 4
"""Elements that cross between ranks at once: device memory that is needed whatever a parameter's size."""


def collect_one_at_a_time(stack: Substitutions) -> None:
    """Let `DistributedOptimizer` collect its state in this way until `stack` is closed."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    collect = DistributedOptimizer.get_parameter_state_dp_zero

    def get_parameter_state_dp_zero(
        self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> Any:
        if not return_on_all_ranks:
            return collect(self, use_gloo_comm, empty_data, return_on_all_ranks)
        return dict(_buffers(self, empty=empty_data))

    stack.replace(DistributedOptimizer, "get_parameter_state_dp_zero", get_parameter_state_dp_zero)


def _buffers(optimizer: Any, *, empty: bool) -> Iterator[tuple[Any, Any]]:
    yield "buckets_coalesced", True
    for number, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[number]
        parameters = {start: parameter for parameter, (start, *_) in buffer.param_index_map.items()}
        ((dtype, buckets),) = ranges.items()
        mine = {parameter: part for bucket in buckets for parameter, part in bucket["param_map"].items()}
        keys = ("param", *getattr(optimizer, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))
        whole: dict[str, Any] = {key: _Buffer(optimizer, key, parameters, mine, empty=empty) for key in keys}
        yield number, {dtype: {**whole, "numel_unpadded": buffer.numel_unpadded}}


class _Buffer:
    """Stands for a flat buffer of one kind of state: slicing it collects the parameter that begins there."""

    def __init__(
        self,
        optimizer: Any,
        key: str,
        parameters: Mapping[int, torch.Tensor],
        mine: Mapping[torch.Tensor, Any],
        *,
        empty: bool,
    ) -> None:
        self._optimizer = optimizer
        self._key = key
        self._parameters = parameters
        self._mine = mine
        self._empty = empty

    def __getitem__(self, place: slice) -> torch.Tensor:
        """Return the whole state of the parameter at `place`, flat and in fp32.

        Where no other rank has a part of it, it is the state itself, and loading goes straight into it.
        """
        group = self._optimizer.data_parallel_group
        parameter = self._parameters[place.start]
        if group.size() == 1:
            return self._shard(parameter)
        whole = _room(place.stop - place.start, parameter.device)
        if not self._empty:
            part = self._mine.get(parameter)
            if part is not None:
                whole[part["param"].start : part["param"].end].copy_(self._shard(parameter))
            _add_up(whole, parameter.device, group)
        return whole

    def _shard(self, parameter: torch.Tensor) -> torch.Tensor:
        states = self._optimizer._get_main_param_and_optimizer_states(parameter)
        shard: torch.Tensor = states[self._key].detach().float()
        return shard


def _room(numel: int, device: torch.device) -> torch.Tensor:
    """Return zeros on `device`, or in host memory if the device has no room for it whole.

    A save must not end a run.
    """
    try:
        return torch.zeros(numel, dtype=torch.float32, device=device)
    except torch.OutOfMemoryError:
        return torch.zeros(numel, dtype=torch.float32)


def _add_up(whole: torch.Tensor, device: torch.device, group: Any) -> None:
    """Put together what each rank has of a tensor and all others have as zeros; as integers, so bits stay."""
    for piece in torch.split(whole.view(torch.int32), PIECE_NUMEL):
        there = piece.to(device)
        torch.distributed.all_reduce(there, group=group)
        if there is not piece:
            piece.copy_(there)
