"""Who owns what, against slow and plain statements of the same rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.planner.ownership import (
    by_size_and_group,
    by_size_and_place,
    deal,
    pack,
    slice_bytewise,
)
from muon_offload_cli.planner.tensors import Optimizer, TensorInfo
from tests.planner.plans import tensor

numels = st.lists(st.integers(1, 5000), max_size=40)
sizes = st.none() | st.integers(1, 20000)


@given(numels, st.integers(1, 9), sizes)
def test_packing_is_the_greedy_one_bucket_by_bucket(
    given_numels: list[int], ranks: int, bucket_size: int | None
) -> None:
    tensors = [tensor(numel) for numel in given_numels]
    owners = pack(tensors, ranks, bucket_size)
    assert owners == plainly_packed(given_numels, ranks, bucket_size)


def plainly_packed(given_numels: list[int], ranks: int, bucket_size: int | None) -> list[int]:
    owners = [0] * len(given_numels)
    buckets: list[list[int]] = [[]]
    for index in range(len(given_numels) - 1, -1, -1):
        buckets[-1].append(index)
        inside = [given_numels[member] for member in buckets[-1]]
        if bucket_size is not None and sum(inside) >= max(bucket_size, int(ranks * max(inside) * 0.9)):
            buckets.append([])
    for bucket in buckets:
        loads = [0] * ranks
        for index in sorted(bucket, key=lambda member: (-given_numels[member], bucket.index(member))):
            rank = loads.index(min(loads))
            owners[index] = rank
            loads[rank] = -(-loads[rank] // 64) * 64 + given_numels[index]
    return owners


@given(numels, st.integers(1, 9))
def test_no_rank_has_more_than_the_least_loaded_one_and_a_parameter(
    given_numels: list[int], ranks: int
) -> None:
    owners = pack([tensor(numel) for numel in given_numels], ranks, None)
    loads = [0] * ranks
    for owner, numel in zip(owners, given_numels, strict=True):
        loads[owner] += numel
    # Each start is aligned to 64 elements, which the loads here leave out.
    assert max(loads) - min(loads) <= max(given_numels, default=0) + 64 * len(given_numels)


def test_dealing_goes_up_and_down_by_size() -> None:
    # The example of _shard_params_ping_pong: 4 ranks, 10 parameters sorted by size.
    owners = deal(by_size_and_group([tensor(size) for size in range(10)]), 4, 1)
    assert owners == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1]


def test_dealing_takes_muon_before_adam_and_experts_apart() -> None:
    mixed = [
        tensor(8, optimizer=Optimizer.ADAM),
        tensor(8),
        tensor(8, expert=True),
        tensor(8),
    ]
    # Muon's two dense ones first, then the expert, the first of its own group, then Adam's.
    dealt = by_size_and_group(mixed)
    assert dealt == [mixed[1], mixed[3], mixed[2], mixed[0]]
    assert deal(dealt, 2, 2) == [0, 1, 0, 1]


def test_the_compact_layout_deals_equals_from_the_last_chunk_by_chunk() -> None:
    first, last = tensor(8), replace(tensor(8), name="last")
    later_chunk = replace(tensor(8), chunk=1)
    assert by_size_and_place([first, last, later_chunk, tensor(4)]) == [tensor(4), last, first, later_chunk]


@given(numels, st.integers(1, 9), sizes)
def test_slices_hold_every_element_once_and_are_of_equal_size(
    given_numels: list[int], ranks: int, bucket_size: int | None
) -> None:
    held = slice_bytewise([tensor(n, optimizer=Optimizer.ADAM) for n in given_numels], ranks, bucket_size)
    for index, numel in enumerate(given_numels):
        assert sum(own.get(index, 0) for own in held) == numel
    assert len(held) == ranks


@pytest.mark.parametrize("shared", [False, True])
def test_a_shared_embedding_has_a_bucket_of_its_own(shared: bool) -> None:
    embedding = TensorInfo(
        name="embedding", shape=(256,), optimizer=Optimizer.ADAM, numel=256, shared_embedding=shared
    )
    held = slice_bytewise([embedding, tensor(256, optimizer=Optimizer.ADAM)], 2, None)
    # Together they are one run that is cut in its middle, apart each is cut in its own.
    assert held == ([{0: 128, 1: 128}, {0: 128, 1: 128}] if shared else [{1: 256}, {0: 256}])
