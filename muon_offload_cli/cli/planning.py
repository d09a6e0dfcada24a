"""Planning on behalf of commands: what Megatron will build from, and what a run needs on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Set
from pathlib import Path

from muon_offload_cli.checkpoints.listing import interrupted_bytes, list_checkpoints
from muon_offload_cli.checkpoints.room import Coming
from muon_offload_cli.config.probing import has_compact_layout
from muon_offload_cli.config.rules import MachineFacts, ParameterFacts, PlannedFacts, check, refuses
from muon_offload_cli.config.rules.directory import uses_directory
from muon_offload_cli.config.rules.settings import in_range
from muon_offload_cli.config.rules.topology import topology_of
from muon_offload_cli.config.schema import Config, Device, Engine
from muon_offload_cli.errors import Level, Problem, UserError
from muon_offload_cli.launch.resume import settle_checkpoints
from muon_offload_cli.machine import memory
from muon_offload_cli.machine.budget import host_budget
from muon_offload_cli.machine.devices import gpu_count, gpu_memory_bytes
from muon_offload_cli.planner.layouts import Capacity, describe_layouts, layouts_for
from muon_offload_cli.planner.pipeline import argument
from muon_offload_cli.planner.plan import Planner, RunPlan
from muon_offload_cli.planner.tensors import Layers
from muon_offload_cli.units import GIB, MIB


def layers_of(config: Config) -> Layers:
    """Return what Megatron will build layers from here; looks whether Transformer Engine is installed."""
    on_gpu = config.device is Device.cuda or (
        config.device is Device.auto and gpu_count() >= config.launcher.ranks_per_node
    )
    local = argument(config, "transformer_impl") == "local"
    if on_gpu and not local and importlib.util.find_spec("transformer_engine") is not None:
        return Layers.TRANSFORMER_ENGINE
    return Layers.LOCAL


def planner_of(config: Config) -> Planner:
    """Return the planner of a run under the Megatron that it would use."""
    return Planner(config, layers_of(config), compact=has_compact_layout(config.megatron.path))


def settle_host_memory(config: Config, written: Set[str], *, here: bool) -> list[Problem]:
    """Replace ``offload.host_memory_gb=auto`` by what a node can give.

    Args:
        config: The composed run; changed in place.
        written: Keys that the user wrote.
        here: Judge this machine; False: the one that ``cluster.host_memory_gb`` describes, if it does.

    Returns:
        A note of what was taken.
    """
    offload = config.offload
    if offload.host_memory_gib is not None:
        return []
    if offload.engine not in (Engine.disk, Engine.mapped):
        offload.host_memory_gb = "0"
        return []
    described = None if here else config.cluster.host_memory_gb
    ranks, staging_mb = config.launcher.ranks_per_node, offload.staging_mb
    if not (in_range(described or 0, 0) and in_range(ranks, 1) and in_range(staging_mb, 0)):
        # The rules refuse these; there is nothing to reckon with.
        return []
    found = memory.inspect() if described is None else memory.of_size(round(described * GIB))
    # What ranks hold on their devices does not depend on the budget, so it can be planned with none.
    plan = plan_of(config, written) if config.device is Device.cpu else None
    budget = host_budget(
        found,
        ranks=ranks,
        staging_bytes=round(staging_mb * MIB),
        device_bytes=plan.nodes[config.launcher.node_rank].device_bytes if plan is not None else 0,
    )
    offload.host_memory_gb = f"{budget.budget_bytes / GIB:.3f}"
    return [
        Problem(
            what=f"offload.host_memory_gb=auto took {budget.explain()}.",
            fix="offload.host_memory_gb=NUMBER to choose it yourself",
            keys=("offload.host_memory_gb",),
            level=Level.NOTE,
        )
    ]


def headroom_bytes() -> int:
    """Return how much host memory this job could still take here."""
    return memory.inspect(Path("/")).headroom_bytes


# Tensors and ranks that are planned before a check answers, some 25 microseconds each. The largest recipe has
# 2,500, and 61 layers of 384 experts without expert parallelism 23,000.
MOST_PLANNED = 40_000


def _is_plannable(config: Config) -> bool:
    """Tell whether planning takes no longer than a check may; nothing larger has ever been trained."""
    model, sizes = config.model, topology_of(config)
    local_experts = (model.moe.num_experts or 0) // sizes.ep
    return model.num_layers * (1 + local_experts) + sizes.world_size <= MOST_PLANNED


def plan_of(config: Config, written: Set[str]) -> RunPlan | None:
    """Return the plan of a run as a check may take it, None if there is none.

    Args:
        config: The composed run, ``offload.host_memory_gb`` a number.
        written: Keys that the user wrote.

    Returns:
        None where the request is wrong, planning would take longer than a check may, or the layout is one of
        those that Megatron takes and the planner does not (`disk-plan` says which).
    """
    if refuses(check(config, written, MachineFacts(), here=False)) or not _is_plannable(config):
        return None
    try:
        return planner_of(config).plan()
    except UserError:
        return None


def layouts_here(
    config: Config, written: Set[str], *, gpus: int, disk_bytes: int | None = None
) -> tuple[str, str]:
    """Return a sentence on the layouts that fit this machine's GPUs, and the words that give the first.

    Args:
        config: A run of more ranks than `gpus`; a budget of ``auto`` counts as none.
        written: Keys that the user wrote.
        gpus: GPUs of this machine, at least 1.
        disk_bytes: Free in the offload directory; None: not known.

    Returns:
        Two empty texts where the request is wrong anyway, or too large to plan.
    """
    if refuses(check(config, written, MachineFacts(), here=False)) or not _is_plannable(config):
        return "", ""
    there = Capacity(
        gpus=gpus, gpu_bytes=gpu_memory_bytes(), host_bytes=headroom_bytes(), disk_bytes=disk_bytes
    )
    return describe_layouts(layouts_for(config, written, there, planner_of), there)


def checkpoints_to_come(config: Config) -> Coming:
    """Return how many checkpoints with optimizer state a run saves, beside those that it goes on from."""
    saving = config.checkpoint
    if saving.directory is None or not saving.optimizer:
        return Coming(saves=0)
    begin = standing = 0
    # What is wrong with it is told where a checkpoint is chosen.
    with contextlib.suppress(UserError, OSError, ValueError):
        config, _ = settle_checkpoints(config, Path.cwd())
        if not config.resume.weights_only:
            begin = config.resume.step or 0
            found = list_checkpoints(Path(str(config.checkpoint.directory)))
            standing = sum(each.complete and each.seal is not None and each.step <= begin for each in found)
    return Coming.of(
        steps=config.train.steps,
        interval=saving.interval,
        begin=begin,
        standing=standing,
        freed=interrupted_bytes(Path(str(config.checkpoint.directory))),
    )


def plan_for_rules(config: Config, written: Set[str]) -> PlannedFacts:
    """Return what the rules need to know of the plan.

    Args:
        config: The composed run, ``offload.host_memory_gb`` a number.
        written: Keys that the user wrote.
    """
    plan = plan_of(config, written)
    if plan is None:
        return PlannedFacts()
    largest, node = plan.largest, plan.nodes[config.launcher.node_rank]
    return PlannedFacts(
        directory_bytes=node.by_directory(len(config.offload.directory or [None]))
        if uses_directory(config)
        else (),
        host_bytes=node.host_bytes + node.staging_bytes,
        staging_bytes=node.staging_bytes,
        device_bytes=node.device_bytes,
        largest_parameter=None
        if largest is None
        else ParameterFacts(name=largest.name, shape=largest.shape, state_bytes=largest.state_bytes),
        checkpoint_bytes=plan.checkpoint_bytes,
        checkpoints=checkpoints_to_come(config),
    )
