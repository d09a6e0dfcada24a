"""Plans of whole runs: sums, kinds, speed."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc

import pytest

from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.planner.distribution import ranks_by_place
from muon_offload_cli.planner.tensors import Layers, Optimizer
from muon_offload_cli.topology import Topology
from tests.fakes.fake_torchrun import HANG_S
from tests.planner.plans import planner

RECIPES = sorted(find_recipes())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layers", list(Layers))
def test_every_recipe_is_planned_and_no_parameter_is_lost(recipe: str, layers: Layers) -> None:
    run = planner(recipe, layers=layers)
    plan = run.plan()
    world = run.inventory.sizes.world_size
    assert sorted(rank for kind in plan.kinds for rank in kind.ranks) == list(range(world))
    owned = sum(len(kind.ranks) * kind.figures.muon_parameters for kind in plan.kinds)
    sizes = run.inventory.sizes
    # What several ranks hold alike is owned once in each of their groups.
    copies = sum(
        tensor.numel
        * ((sizes.etp * sizes.ep if tensor.expert else sizes.tp) // tensor.parts - 1)
        * tensor.parts
        for tensors in run.inventory.stages
        for tensor in tensors
        if tensor.optimizer is Optimizer.MUON
    )
    assert owned == plan.muon_parameters + copies


def test_node_totals_are_sums_over_their_own_ranks() -> None:
    plan = planner("tiny", "launcher.nodes=2", "launcher.ranks_per_node=2", "parallel.tp=2").plan()
    of_rank = {rank: kind.figures for kind in plan.kinds for rank in kind.ranks}
    for node in plan.nodes:
        own = [of_rank[2 * node.node], of_rank[2 * node.node + 1]]
        assert node.disk_bytes == sum(rank.disk_bytes for rank in own)
        assert node.each_way_bytes == sum(rank.each_way_bytes for rank in own)
        assert node.staging_bytes == sum(rank.staging_bytes for rank in own)


def test_large_parameters_are_named_once_with_their_number() -> None:
    plan = planner("tiny", "offload.chunk_mb=0.4").plan()
    found = {large.name: large.count for large in plan.oversized}
    # 4 layers, each matrix in two parts; 8 experts in 4 layers, each in two parts.
    assert found["decoder.layers.*.self_attention.linear_qkv.weight"] == 8
    assert found["decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight"] == 64
    assert plan.largest is not None
    assert plan.largest.state_bytes == 256 * 256 * 8
    assert planner("tiny", "offload.chunk_mb=0").plan().oversized == ()


def test_a_checkpoint_has_weights_and_all_optimizer_state() -> None:
    plan = planner("tiny").plan()
    assert plan.checkpoint_bytes == plan.muon_parameters * 10 + plan.adam_parameters * 14


def test_ranks_are_numbered_as_megatron_numbers_them() -> None:
    sizes = Topology(world_size=16, tp=2, pp=2, cp=1, ep=4, etp=1)
    places = {rank: place for place, ranks in ranks_by_place(sizes).items() for rank in ranks}
    assert [(places[r].stage, places[r].dense, places[r].expert) for r in range(9)] == [
        (0, 0, 0),
        (0, 0, 0),
        (0, 1, 0),
        (0, 1, 0),
        (0, 2, 1),
        (0, 2, 1),
        (0, 3, 1),
        (0, 3, 1),
        (1, 0, 0),
    ]


# Each rank holds a part of every layer.
ONE_STAGE = (
    "parallel.pp=1",
    "parallel.ep=8",
    "parallel.decoder_first_pipeline_num_layers=null",
    "parallel.decoder_last_pipeline_num_layers=null",
)


@pytest.mark.parametrize("words", [(), ONE_STAGE])
def test_a_trillion_parameters_on_1024_ranks_take_seconds(words: tuple[str, ...]) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        plan = planner("kimi_k2", *words).plan()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 10, "5 s, and as much again for tracing memory"
    assert plan.parameters > 10**12
    assert len(plan.nodes) == 128
    assert peak < 2**29


def test_planning_imports_neither_torch_nor_megatron() -> None:
    text = (
        "import sys; from muon_offload_cli.cli.main import run; code = run(['disk-plan', 'recipe=tiny']);"
        "assert code == 0, code; assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
