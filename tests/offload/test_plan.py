"""The chunk plan, for any list of shapes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.offload.plan import (
    CHUNK_ALIGNMENT,
    STATE_ALIGNMENT,
    Chunk,
    ChunkPlan,
    ParameterSpec,
    Slot,
    Tier,
    plan_chunks,
)

shapes = st.lists(st.integers(0, 90), min_size=0, max_size=3).map(tuple)
specs = st.builds(ParameterSpec, shape=shapes, domain=st.booleans())
adaptive = st.builds(ParameterSpec, shape=shapes, domain=st.booleans(), second_moment=shapes)
parameter_lists = st.lists(specs, max_size=40) | st.lists(adaptive, max_size=40)
budgets = st.one_of(st.just(0), st.integers(1, 200_000))
settings = st.fixed_dictionaries(
    {
        "chunk_bytes": budgets,
        "fraction": st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
        "host_bytes": st.one_of(st.just(0), st.integers(0, 2_000_000)),
        "disk": st.booleans(),
        "windows": st.integers(1, 5),
    }
)


def moment_bytes(parameter: ParameterSpec) -> int:
    return 0 if parameter.second_moment is None else 4 * math.prod(parameter.second_moment)


def image_bytes(*parameters: ParameterSpec) -> int:
    """Bytes of masters, momenta and second moments, each aligned, as they count against budgets."""
    sizes = [size for p in parameters for size in (4 * p.numel, 4 * p.numel, moment_bytes(p))]
    return sum(-(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT for size in sizes)


def members(plan: ChunkPlan) -> list[int]:
    return [index for chunk in plan.chunks for index in chunk.parameters]


@given(parameter_lists, settings)
def test_every_parameter_is_in_exactly_one_chunk_and_the_order_is_kept(
    parameters: list[ParameterSpec], given: dict[str, Any]
) -> None:
    plan = plan_chunks(parameters, **given)
    assert members(plan) == list(range(len(parameters)))
    assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))


@given(parameter_lists, settings)
def test_slots_lie_aligned_inside_their_chunk_and_apart(
    parameters: list[ParameterSpec], given: dict[str, Any]
) -> None:
    for chunk in plan_chunks(parameters, **given).chunks:
        slots = [*chunk.masters, *chunk.momenta, *chunk.second_moments]
        sizes = [4 * parameters[index].numel for index in chunk.parameters] * 2
        if parameters[0].second_moment is not None:
            sizes += [moment_bytes(parameters[index]) for index in chunk.parameters]
        assert [slot.nbytes for slot in slots] == sizes
        assert all(slot.offset % STATE_ALIGNMENT == 0 for slot in slots)
        ends = [slot.offset + slot.nbytes for slot in slots]
        assert all(end <= after.offset for end, after in zip(ends, slots[1:], strict=False))
        assert max(ends) <= chunk.nbytes
        assert chunk.nbytes % CHUNK_ALIGNMENT == 0
        assert 0 < chunk.nbytes < max(ends) + STATE_ALIGNMENT + CHUNK_ALIGNMENT
        assert chunk.state_bytes == sum(sizes)


@given(parameter_lists, settings)
def test_a_chunk_keeps_its_budget_or_holds_one_oversized_parameter(
    parameters: list[ParameterSpec], given: dict[str, Any]
) -> None:
    budget = given["chunk_bytes"]
    for chunk in plan_chunks(parameters, **given).chunks:
        own = [parameters[index] for index in chunk.parameters]
        if budget and image_bytes(*own) > budget:
            # Parameters without elements take no bytes and may come along.
            assert sum(image_bytes(parameter) > 0 for parameter in own) == 1


@given(parameter_lists, settings)
def test_neighbours_that_fit_one_budget_share_a_chunk(
    parameters: list[ParameterSpec], given: dict[str, Any]
) -> None:
    budget = given["chunk_bytes"]
    for left, right in itertools.pairwise(plan_chunks(parameters, **given).chunks):
        both = [parameters[index] for index in (*left.parameters, right.parameters[0])]
        same_domain = both[-2].domain == both[-1].domain
        same_side = (left.tier is Tier.GPU) == (right.tier is Tier.GPU)
        if same_domain and same_side:
            assert budget
            assert image_bytes(*both) > budget


@given(parameter_lists, settings)
def test_domains_never_share_a_chunk(parameters: list[ParameterSpec], given: dict[str, Any]) -> None:
    for chunk in plan_chunks(parameters, **given).chunks:
        assert len({parameters[index].domain for index in chunk.parameters}) == 1


@given(parameter_lists, settings)
def test_the_fraction_of_each_domain_leaves_the_gpu_and_the_rest_is_its_end(
    parameters: list[ParameterSpec], given: dict[str, Any]
) -> None:
    plan = plan_chunks(parameters, **given)
    on_gpu = {index for chunk in plan.of_tier(Tier.GPU) for index in chunk.parameters}
    for domain in {parameter.domain for parameter in parameters}:
        members = [index for index, parameter in enumerate(parameters) if parameter.domain == domain]
        leaving = [parameters[index] for index in members if index not in on_gpu]
        wanted = round(image_bytes(*(parameters[index] for index in members)) * given["fraction"])
        assert image_bytes(*leaving) <= wanted
        staying = members[len(leaving) :]
        assert on_gpu.intersection(members) == set(staying)
        if staying:
            # One parameter more would have been too many.
            assert image_bytes(*leaving, parameters[staying[0]]) > wanted


@given(parameter_lists, settings)
def test_the_host_budget_is_never_exceeded_and_is_used(
    parameters: list[ParameterSpec], given: dict[str, Any]
) -> None:
    plan = plan_chunks(parameters, **given | {"disk": True})
    hosted, budget = plan.bytes_of(Tier.HOST), given["host_bytes"]
    assert hosted <= budget
    streamed = hosted + plan.bytes_of(Tier.DISK)
    largest = max((chunk.nbytes for chunk in plan.of_tier(Tier.HOST, Tier.DISK)), default=0)
    assert hosted == streamed or hosted > budget - 2 * largest


@given(parameter_lists, settings)
def test_without_a_disk_tier_all_that_leaves_goes_to_the_host(
    parameters: list[ParameterSpec], given: dict[str, Any]
) -> None:
    plan = plan_chunks(parameters, **given | {"disk": False})
    assert not plan.of_tier(Tier.DISK)
    with_disk = plan_chunks(parameters, **given | {"disk": True})
    assert plan.bytes_of(Tier.GPU) == with_disk.bytes_of(Tier.GPU)


@given(parameter_lists, settings)
def test_equal_shapes_give_equal_plans_whatever_the_domains_are_called(
    parameters: list[ParameterSpec], given: dict[str, Any]
) -> None:
    renamed = [replace(p, domain=("experts", 7) if p.domain else "dense") for p in parameters]
    assert plan_chunks(parameters, **given) == plan_chunks(renamed, **given)


@pytest.mark.parametrize(
    ("hosted", "tiers"),
    [
        (3, "DD DHDHDH DD"),
        (6, "DD HHHHHH DD"),
        (7, "HD HHHHHH DD"),
        (10, "HH HHHHHH HH"),
    ],
)
def test_what_the_windows_hold_in_turn_goes_to_disk_first_and_the_rest_alternates(
    hosted: int, tiers: str
) -> None:
    parameters = [ParameterSpec(shape=(512,))] * 10
    plan = plan_chunks(
        parameters, chunk_bytes=4096, fraction=1.0, host_bytes=hosted * 4096, disk=True, windows=2
    )
    names = {Tier.DISK: "D", Tier.HOST: "H"}
    assert [names[chunk.tier] for chunk in plan.chunks] == list(tiers.replace(" ", ""))


def test_chunk_images_are_laid_out_masters_first() -> None:
    parameters = [ParameterSpec(shape=(3, 5)), ParameterSpec(shape=(200,))]
    plan = plan_chunks(parameters, chunk_bytes=0, fraction=1.0, host_bytes=0, disk=True, windows=2)
    assert plan.chunks == (
        Chunk(
            index=0,
            parameters=(0, 1),
            masters=(Slot(offset=0, nbytes=60), Slot(offset=512, nbytes=800)),
            momenta=(Slot(offset=1536, nbytes=60), Slot(offset=2048, nbytes=800)),
            nbytes=4096,
            tier=Tier.DISK,
        ),
    )


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_no_parameters_give_an_empty_plan(fraction: float) -> None:
    plan = plan_chunks([], chunk_bytes=100, fraction=fraction, host_bytes=0, disk=True, windows=2)
    assert plan.chunks == ()
    assert plan.bytes_of(Tier.GPU, Tier.HOST, Tier.DISK) == 0


@given(
    dense=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    experts=st.lists(st.lists(st.integers(1, 400), max_size=8), min_size=2, max_size=2),
    fraction=st.floats(0, 1),
    chunk_bytes=st.sampled_from([0, 4096, 20_000]),
)
def test_peers_with_other_experts_visit_dense_parameters_in_the_same_order(
    dense: list[int], experts: list[list[int]], fraction: float, chunk_bytes: int
) -> None:
    def visits(own: list[int]) -> list[int]:
        parameters = [ParameterSpec(shape=(size,), domain=False) for size in dense]
        parameters += [ParameterSpec(shape=(size,), domain=True) for size in own]
        plan = plan_chunks(
            parameters, chunk_bytes=chunk_bytes, fraction=fraction, host_bytes=0, disk=True, windows=2
        )
        order = [*plan.of_tier(Tier.GPU), *plan.of_tier(Tier.HOST, Tier.DISK)]
        return [index for chunk in order for index in chunk.parameters if index < len(dense)]

    assert visits(experts[0]) == visits(experts[1])
