"""Layouts of a model for fewer GPUs than its recipe has: those that the rules accept and that fit. Pure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from muon_offload_cli.config.changes import changes
from muon_offload_cli.config.rules import MachineFacts, check, refuses
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import UserError
from muon_offload_cli.planner.plan import Planner
from muon_offload_cli.units import format_bytes

MOST_SHOWN = 3
MOST_PLANNED = 12
"""Candidates that are planned before an answer is given; each takes some tenths of a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What a machine has for one node of a run; None: not known, and not judged.

    Attributes:
        gpus: GPUs of the machine.
        gpu_bytes: Memory of one.
        host_bytes: Host memory that a job could take.
        disk_bytes: Free on the filesystem of the offload directory.
    """

    gpus: int
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to lay the model out.

    Attributes:
        overrides: Words that turn the recipe's layout into this one.
        device_bytes: What its heaviest rank keeps on a GPU, activations not counted.
        lacks: What there is too little of, empty if it fits.
    """

    overrides: str
    device_bytes: int
    lacks: str


def describe_layouts(layouts: Sequence[Layout], capacity: Capacity) -> tuple[str, str]:
    """Return a sentence on the layouts that fit, and the words of the first.

    Args:
        layouts: From `layouts_for`.
        capacity: What they were judged by.
    """
    fitting = [layout for layout in layouts if not layout.lacks]
    size = f" of {format_bytes(capacity.gpu_bytes)}" if capacity.gpu_bytes is not None else ""
    if fitting:
        listed = "; ".join(f"{one.overrides} ({format_bytes(one.device_bytes)})" for one in fitting)
        return (
            f"What fits here, with what it keeps on each GPU{size} besides activations: {listed}.",
            fitting[0].overrides,
        )
    if layouts:
        least = min(layouts, key=lambda one: one.device_bytes)
        return (
            f"None of the {len(layouts)} layouts nearest to the recipe's fits here; the smallest, "
            f"{least.overrides}, needs {least.lacks}.",
            "",
        )
    return "The rules accept no layout of the model for it.", ""


def layouts_for(
    config: Config, written: Set[str], capacity: Capacity, planner_of: Callable[[Config], Planner]
) -> list[Layout]:
    """Return layouts of the same model for a machine of fewer GPUs, those like the recipe's first.

    Args:
        config: A run of more ranks a node, accepted by the rules; it is not changed.
        written: Keys that the user wrote.
        capacity: What the machine has.
        planner_of: Gives the planner of a run.

    Returns:
        At most `MOST_SHOWN` that fit; if none does, all that were planned.
    """
    found: list[Layout] = []
    fitting: list[Layout] = []
    planned = 0
    for candidate in _candidates(config, capacity.gpus):
        if refuses(check(candidate, written, MachineFacts(), here=False)):
            continue
        planned += 1
        try:
            layout = _judged(config, candidate, capacity, planner_of(candidate))
        except UserError:
            # Megatron would take it, and the planner cannot say what it needs.
            continue
        found.append(layout)
        fitting += [] if layout.lacks else [layout]
        if len(fitting) == MOST_SHOWN or planned == MOST_PLANNED:
            break
    return fitting or found


def _judged(config: Config, candidate: Config, capacity: Capacity, planner: Planner) -> Layout:
    plan = planner.plan()
    node, device = plan.heaviest_node, max(kind.figures.device_bytes for kind in plan.kinds)
    needs = (
        (device, capacity.gpu_bytes, "on each GPU besides activations"),
        (node.host_bytes + node.staging_bytes, capacity.host_bytes, "of host memory"),
        (node.disk_bytes, capacity.disk_bytes, "on the drive"),
    )
    lacks = [
        f"{format_bytes(needed)} {what}, and there are {format_bytes(there)}"
        for needed, there, what in needs
        if there is not None and needed > there
    ]
    return Layout(
        overrides=" ".join(change.override for change in changes(config, candidate)),
        device_bytes=device,
        lacks=", ".join(lacks),
    )


def _candidates(config: Config, gpus: int) -> Iterator[Config]:
    """Yield layouts over `gpus` ranks a node and fewer; with the recipe's own sizes before others."""
    own = config.parallel
    experts = config.model.moe.num_experts is not None
    for ranks in range(gpus, 0, -1):
        world = ranks * config.launcher.nodes
        sizes = [
            (tp, pp, ep)
            for tp in _divisors(world)
            for pp in _divisors(world // tp)
            for ep in (_divisors(world // pp) if experts else [1])
            if tp <= ranks and pp <= config.model.num_layers
        ]
        sizes.sort(key=lambda at: (at[0] != own.tp, at[1] != own.pp, -at[2], at[1], at[0]))
        for tp, pp, ep in sizes:
            yield _laid_out(config, ranks, tp=tp, pp=pp, ep=ep)


def _laid_out(config: Config, ranks: int, *, tp: int, pp: int, ep: int) -> Config:
    other = copy.deepcopy(config)
    other.launcher.ranks_per_node = ranks
    parallel = other.parallel
    parallel.tp, parallel.ep = tp, ep
    experts = other.model.moe.num_experts is not None
    # Megatron's experts under tensor parallelism need it.
    parallel.sequence_parallel = tp > 1 and (parallel.sequence_parallel or experts)
    if experts:
        whole = ep * tp * pp > ranks * other.launcher.nodes
        parallel.etp = 1 if whole else parallel.etp if parallel.etp is None else min(parallel.etp, tp)
    if pp != parallel.pp:
        # The cut belongs to the recipe's number of stages.
        parallel.pp = pp
        parallel.decoder_first_pipeline_num_layers = parallel.decoder_last_pipeline_num_layers = None
        parallel.num_virtual_stages_per_pipeline_rank = parallel.pipeline_model_parallel_layout = None
    return other


def _divisors(value: int) -> list[int]:
    return [size for size in range(1, value + 1) if value % size == 0]
