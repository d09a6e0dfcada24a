"""Layouts for fewer GPUs: what is offered passes the rules, fits, and can be pasted."""

from __future__ import annotations

import copy
import shlex

import pytest

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.rules import MachineFacts, check, refuses
from muon_offload_cli.config.schema import Config
from muon_offload_cli.planner.layouts import Capacity, describe_layouts, layouts_for
from muon_offload_cli.planner.plan import Planner
from muon_offload_cli.planner.tensors import Layers
from muon_offload_cli.units import GIB, MIB

TWO = Capacity(gpus=2, gpu_bytes=140 * GIB, host_bytes=100 * GIB, disk_bytes=400 * GIB)


def planner_of(config: Config) -> Planner:
    return Planner(config, Layers.LOCAL)


@pytest.mark.parametrize("recipe", ["qwen35_35b", "qwen3_4b", "tiny"])
def test_an_offered_layout_is_pasted_accepted_and_no_larger_than_said(recipe: str) -> None:
    composition = compose(recipe)
    before = copy.deepcopy(composition.config)
    layouts = layouts_for(composition.config, composition.written, TWO, planner_of)
    assert composition.config == before
    assert 1 <= len(layouts) <= 3
    for layout in layouts:
        assert not layout.lacks
        pasted = compose(recipe, shlex.split(layout.overrides))
        assert pasted.config.launcher.ranks_per_node <= 2
        assert not refuses(check(pasted.config, pasted.written, MachineFacts(), here=False))
        plan = planner_of(pasted.config).plan()
        device = max(kind.figures.device_bytes for kind in plan.kinds)
        assert device == layout.device_bytes <= 140 * GIB
        assert plan.heaviest_node.disk_bytes <= 400 * GIB


def test_the_recipes_own_sizes_come_first_and_a_cut_for_other_stages_is_dropped() -> None:
    composition = compose("glm45_air")
    layouts = layouts_for(composition.config, composition.written, TWO, planner_of)
    assert layouts[0].overrides == "launcher.ranks_per_node=2 parallel.ep=2"
    assert "parallel.decoder_first_pipeline_num_layers=null" in layouts[1].overrides


@pytest.mark.parametrize(
    ("capacity", "lacks"),
    [
        (Capacity(gpus=2, gpu_bytes=2 * MIB), "on each GPU besides activations"),
        (Capacity(gpus=2, host_bytes=MIB), "of host memory"),
        (Capacity(gpus=2, disk_bytes=MIB), "on the drive"),
    ],
)
def test_what_there_is_too_little_of_is_told_when_nothing_fits(capacity: Capacity, lacks: str) -> None:
    composition = compose("tiny")
    told, fix = describe_layouts(
        layouts_for(composition.config, composition.written, capacity, planner_of), capacity
    )
    assert lacks in told
    assert "nearest to the recipe's fits here" in told
    assert fix == ""


def test_experts_under_tensor_parallelism_get_what_megatron_demands() -> None:
    composition = compose("moonlight_16b_a3b", ["parallel.etp=null"])
    for layout in layouts_for(composition.config, composition.written, TWO, planner_of):
        assert ("parallel.tp=2" in layout.overrides) == (
            "parallel.sequence_parallel=true" in layout.overrides
        )


def test_three_gpus_are_used_as_two_where_nothing_divides_by_three() -> None:
    composition = compose("tiny")
    capacity = Capacity(gpus=3)
    layouts = layouts_for(composition.config, composition.written, capacity, planner_of)
    told, fix = describe_layouts(layouts, capacity)
    assert fix.startswith("launcher.ranks_per_node=2 ")
    assert "ranks_per_node=3" not in told
    assert "on each GPU besides" in told
