"""Which data-parallel rank owns each parameter under layer-wise distribution.

Rules of megatron-core 0.18.2 to 0.19.2 and of the development branch of 2026-08-21, in our own words from
megatron/core/optimizer/layer_wise_optimizer.py: bin packing per gradient bucket, and dealing by size. Dense
parameters go to the ranks of the data-and-context-parallel group, experts' to those of the expert
data-parallel group.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Sequence

from muon_offload_cli.planner.tensors import Optimizer, TensorInfo
from muon_offload_cli.units import round_up


class ParamLayout(enum.Enum):
    """How layer-wise distribution lays parameters out and shares them.

    Attributes:
        PACKED: Shard-aligned buffers, Muon's parameters packed into their shards; Adam's cut bytewise.
        DEALT: All parameters dealt by size, Adam's too (the older path).
        COMPACT: Muon's parameters dealt by size, Adam's cut bytewise (development branch).
    """

    PACKED = enum.auto()
    DEALT = enum.auto()
    COMPACT = enum.auto()


START_ALIGNMENT = 64
"""Elements that a parameter's place in a buffer is a multiple of (``pad_param_start``)."""

PADDING_FLOOR = 0.9
"""A bucket that one parameter dominates grows to this part of its padded size (layer_wise_optimizer.py)."""


def pack(tensors: Sequence[TensorInfo], ranks: int, bucket_size: int | None) -> list[int]:
    """Assign the parameters of one buffer to ranks, bucket by bucket.

    A bucket is a run of parameters from the last to the first, closed once it has its size. In it, the
    largest parameter goes first to the rank with the least so far (longest processing time first); of equals
    the one nearer to the model's end goes first, and of equally loaded ranks the lowest.

    Args:
        tensors: Parameters of one buffer in the model's order, one model chunk.
        ranks: Size of the group that shares them.
        bucket_size: Elements of a bucket; None: one bucket a buffer.

    Returns:
        The owner of each, in the order given.
    """
    owners = [0] * len(tensors)
    if ranks == 1:
        return owners
    members: list[int] = []
    filled = largest = 0
    for index in reversed(range(len(tensors))):
        numel = tensors[index].numel
        members.append(index)
        filled += numel
        largest = max(largest, numel)
        if bucket_size is not None and filled >= max(bucket_size, int(ranks * largest * PADDING_FLOOR)):
            _pack_bucket(tensors, members, ranks, owners)
            members, filled, largest = [], 0, 0
    _pack_bucket(tensors, members, ranks, owners)
    return owners


def _pack_bucket(tensors: Sequence[TensorInfo], members: list[int], ranks: int, owners: list[int]) -> None:
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(members, key=lambda member: -tensors[member].numel):
        load, rank = loads[0]
        owners[index] = rank
        placed = round_up(load, START_ALIGNMENT) + tensors[index].numel
        heapq.heapreplace(loads, (placed, rank))


def deal(tensors: Sequence[TensorInfo], dense_ranks: int, expert_ranks: int) -> list[int]:
    """Assign parameters in turn to ranks up and down: 0, 1, ... n-1, n-1, ... 1, 0, and again.

    Dense and expert parameters are dealt apart.

    Args:
        tensors: Parameters of a rank, in the order of `by_size_and_group` or `by_size_and_place`.
        dense_ranks: Size of the data-and-context-parallel group.
        expert_ranks: Size of the expert data-parallel group.

    Returns:
        The owner of each, in the order given.
    """
    owners = []
    turns = {False: 0, True: 0}
    for tensor in tensors:
        ranks = expert_ranks if tensor.expert else dense_ranks
        turn = turns[tensor.expert] % (2 * ranks)
        owners.append(turn if turn < ranks else 2 * ranks - 1 - turn)
        turns[tensor.expert] += 1
    return owners


def by_size_and_group(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Order parameters for `ParamLayout.DEALT`.

    Muon's come before Adam's where sizes are equal, because Megatron lists their groups in that order.
    """
    return sorted(tensors, key=lambda tensor: (tensor.numel, group_key(tensor)))


def by_size_and_place(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Order Muon's parameters for `ParamLayout.COMPACT`: equals by place, counted from a buffer's last."""
    places = sorted(
        range(len(tensors)), key=lambda place: (tensors[place].numel, tensors[place].chunk, -place)
    )
    return [tensors[place] for place in places]


def group_key(tensor: TensorInfo) -> tuple[bool, bool, bool]:
    """Order of the optimizer groups that Megatron sorts parameters into (``_get_param_groups``).

    Muon's group has no overrides and comes first; of Adam's, the one that weight decay spares is last. Within
    each, dense parameters come before experts', which appear later in every layer.
    """
    adam = tensor.optimizer is Optimizer.ADAM
    spared = adam and (len(tensor.shape) == 1 or tensor.name.endswith(".bias"))
    return adam, spared, tensor.expert


def slice_bytewise(
    tensors: Sequence[TensorInfo], ranks: int, bucket_size: int | None
) -> list[dict[int, int]]:
    """Share one buffer out in equal slices through parameters, as DistributedOptimizer does for Adam.

    Rule of ``_compute_per_buffer_param_layout`` in megatron/core/optimizer/distrib_optimizer.py: from the
    last parameter to the first, starts aligned, each bucket padded to a multiple of the ranks and of 128; a
    shared embedding has a bucket of its own.

    Returns:
        For each rank, the elements it holds of each parameter that it holds any of, by index.
    """
    held: list[dict[int, int]] = [{} for _ in range(ranks)]
    multiple = math.lcm(ranks, 128)
    spans: list[tuple[int, int, int]] = []
    begin = cursor = 0

    def close(end: int) -> int:
        size = round_up(end, multiple) - begin
        for index, start, stop in spans:
            _share(held, index, start - begin, stop - begin, size // ranks)
        spans.clear()
        return begin + size

    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        cursor = round_up(cursor, START_ALIGNMENT)
        if tensor.shared_embedding and spans:
            begin = cursor = close(cursor)
        spans.append((index, cursor, cursor + tensor.numel))
        cursor += tensor.numel
        full = bucket_size is not None and cursor - begin >= bucket_size
        if full or tensor.shared_embedding:
            begin = cursor = close(cursor)
    if spans:
        close(cursor)
    return held


def _share(held: list[dict[int, int]], index: int, start: int, stop: int, slice_size: int) -> None:
    rank = start // slice_size
    while start < stop:
        end = min(stop, (rank + 1) * slice_size)
        held[rank][index] = end - start
        start, rank = end, rank + 1
