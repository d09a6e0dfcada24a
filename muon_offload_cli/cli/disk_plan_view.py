"""What ``disk-plan`` shows: figures a line each, bars a rank and tier, the verdict; or all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from muon_offload_cli.cli.exact import Differences
from muon_offload_cli.cli.problems import print_problems
from muon_offload_cli.cli.train_view import make_console
from muon_offload_cli.config.rules.directory import as_word
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem
from muon_offload_cli.offload.directories import describe
from muon_offload_cli.planner.cost import GB, Bandwidth, StepCost
from muon_offload_cli.planner.fit import Fit
from muon_offload_cli.planner.picture import bars_of, name_ranks
from muon_offload_cli.planner.plan import RunPlan
from muon_offload_cli.units import counted, format_bytes

KINDS_SHOWN = 8
BAR_CELLS = 32
_COLOURS = {"disk": "blue", "host": "yellow", "device": "green"}


def figures(
    config: Config, plan: RunPlan, fit: Fit, bandwidth: Bandwidth | None, cost: StepCost | None
) -> list[tuple[str, str]]:
    """Return the figures of a plan as label and text."""
    rank, node = plan.heaviest.figures, plan.heaviest_node
    lines = [
        ("model", _model(plan)),
        ("one checkpoint", format_bytes(plan.checkpoint_bytes)),
        ("heaviest rank", _heaviest(config, plan)),
        (
            "  muon owns",
            f"{rank.muon_parameters:,} parameters: {format_bytes(rank.momentum_bytes)} of momentum, "
            f"{format_bytes(rank.master_bytes)} of master weights"
            + (
                f", {format_bytes(rank.second_moment_bytes)} of second moments"
                * bool(rank.second_moment_bytes)
            ),
        ),
        ("  on disk", f"{format_bytes(rank.disk_bytes)} in {_chunks(rank.chunks_on_disk, rank.chunks)}"),
        (
            "  in host memory",
            f"{format_bytes(rank.host_bytes)} of state, {format_bytes(rank.staging_bytes)} of staging",
        ),
        (
            "  on the device",
            f"{format_bytes(rank.device_bytes)}: weights {format_bytes(rank.weight_bytes)}, gradients "
            f"{format_bytes(rank.gradient_bytes)}, Adam {format_bytes(rank.adam_state_bytes)}, "
            f"{rank.windows} windows {format_bytes(rank.window_bytes)}, Muon {format_bytes(rank.gpu_bytes)}"
            + ", all of it host memory on CPUs"
            * plan.on_cpu,
        ),
    ]
    if rank.gradient_copy_bytes:
        text = f"{format_bytes(rank.gradient_copy_bytes)} more there: fp32 copies of bf16 gradients"
        lines.append(("  while it steps", text))
    lines.append(("  keeps open", f"{counted(rank.open_files, 'file')}, {counted(rank.maps, 'mapping')}"))
    if plan.largest is not None:
        lines.append(("largest parameter", f"{plan.largest.name} {_shape(plan.largest.shape)}"))
    for large in plan.oversized:
        text = f"{large.name} {_shape(large.shape)}, {large.count} of {format_bytes(large.state_bytes)}"
        lines.append((f"over {config.offload.chunk_mb:g} MiB", text))
    lines += [
        (
            "heaviest node",
            f"{format_bytes(node.disk_bytes)} on disk, {format_bytes(plan.host_bytes)} of host memory"
            + (f" ({format_bytes(fit.headroom_bytes)} free)" if fit.headroom_bytes is not None else ""),
        ),
        (
            "a step moves",
            f"{format_bytes(rank.each_way_bytes)} a rank, {format_bytes(node.each_way_bytes)} a node, "
            "each way: read, and as much written",
        ),
    ]
    if fit.needed_bytes:
        lines += [("directory", text) for text in _rooms(config, plan, fit)]
    if fit.saved_on is not None and fit.saved_bytes:
        free, needed = format_bytes(fit.saved_on.free_bytes), format_bytes(fit.saved_bytes)
        lines.append(("checkpoints", f"{fit.saved_on.directory}: {free} free, {needed} needed"))
    lines.append(("a step waits", _wait(plan, bandwidth, cost)))
    return lines


def in_three_lines(plan: RunPlan) -> list[tuple[str, str]]:
    """Return what a plan comes to, as label and text."""
    rank, node = plan.heaviest.figures, plan.heaviest_node
    return [
        ("model", _model(plan)),
        (
            "heaviest rank",
            f"{format_bytes(rank.disk_bytes)} on disk, "
            f"{format_bytes(rank.host_bytes + rank.staging_bytes)} of host memory, "
            f"{format_bytes(rank.device_bytes)} on the device without activations",
        ),
        (
            "heaviest node",
            f"{format_bytes(node.disk_bytes)} on disk, {format_bytes(plan.host_bytes)} of host memory; "
            f"a step reads {format_bytes(node.each_way_bytes)} and writes as much",
        ),
    ]


def show(
    plan: RunPlan,
    fit: Fit,
    lines: Sequence[tuple[str, str]],
    remarks: Sequence[object],
    differences: Differences | None,
) -> None:
    """Print figures, bars and verdict; problems go to standard error."""
    console = make_console()
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        console.print(Text.assemble((f"{label:<{width}}  ", "bold"), text))
    console.print()
    for row in bar_rows(plan):
        console.print(row)
    if differences is not None:
        ranks = counted(len(differences.ranks), "rank")
        built = f"{ranks}, {differences.tensors} tensors, {differences.layers} layers"
        state = "agrees with" if not differences.found else "differs from"
        console.print(f"the plan {state} Megatron's own modules ({built})")
        for line in differences.found:
            console.print(f"  {line}")
    problems = [remark for remark in remarks if isinstance(remark, Problem)]
    print_problems([*problems, *fit.problems])
    known = fit.free_bytes is not None or not fit.needed_bytes
    console.print(("fits" if known else "nothing known is against it") if fit.fits else "does not fit")


def bar_rows(plan: RunPlan) -> list[Text]:
    """Return one row a tier of each kind of rank, bars on one scale."""
    kinds = plan.kinds[:KINDS_SHOWN]
    longest = max((bar.total for kind in kinds for bar in bars_of(kind.figures)), default=0) or 1
    pipeline = len({kind.stage for kind in plan.kinds}) > 1
    rows = []
    for kind in kinds:
        rows.append(Text(name_ranks(kind, pipeline), style="bold"))
        for bar in bars_of(kind.figures):
            cells = round(bar.total / longest * BAR_CELLS)
            drawn = "█" * max(cells, 1 if bar.total else 0)
            parts = [f"{name} {format_bytes(size)}" for name, size in bar.parts if size]
            rows.append(
                Text.assemble(
                    f"  {bar.label:<7}",
                    (f"{drawn:<{BAR_CELLS}}", _COLOURS[bar.label]),
                    f" {format_bytes(bar.total) if bar.total else '-':>11}",
                    f"  {', '.join(parts)}" if len(parts) > 1 else "",
                )
            )
    if len(plan.kinds) > len(kinds):
        rows.append(Text(f"and {len(plan.kinds) - len(kinds)} more kinds of rank"))
    return rows


def as_json(
    config: Config,
    plan: RunPlan,
    fit: Fit,
    bandwidth: Bandwidth | None,
    cost: StepCost | None,
    differences: Differences | None,
) -> str:
    """Return everything as JSON, sizes in bytes and times in seconds."""
    data: dict[str, Any] = {
        "recipe": config.recipe,
        "engine": plan.engine,
        "layers": str(plan.layers),
        "parameters": plan.parameters,
        "muon_parameters": plan.muon_parameters,
        "adam_parameters": plan.adam_parameters,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "kinds": [
            {
                "ranks": list(kind.ranks),
                "stage": kind.stage,
                **asdict(kind.figures),
                "muon_state_bytes": kind.figures.muon_state_bytes,
                "device_bytes": kind.figures.device_bytes,
            }
            for kind in plan.kinds
        ],
        "nodes": [asdict(node) for node in plan.nodes],
        "largest": asdict(plan.largest) if plan.largest else None,
        "oversized": [asdict(large) for large in plan.oversized],
        "directory": as_word(config.offload.directory or []) if fit.needed_bytes else None,
        "directories": [
            {"path": path, "needed_bytes": needed}
            for path, needed in zip(
                config.offload.directory or (),
                plan.heaviest_node.by_directory(len(config.offload.directory or [None])),
                strict=False,
            )
        ],
        "placement": describe(len(config.offload.directory or ()), config.launcher.ranks_per_node),
        "needed_bytes": fit.needed_bytes,
        "peak_bytes": fit.peak_bytes,
        "free_bytes": fit.free_bytes,
        "host_needed_bytes": fit.host_needed_bytes,
        "host_headroom_bytes": fit.headroom_bytes,
        "fits": fit.fits,
        "problems": [{"what": problem.what, "fix": problem.fix} for problem in fit.problems],
        "bandwidth": asdict(bandwidth) if bandwidth else None,
        "step": asdict(cost) if cost else None,
        "exact": asdict(differences) if differences else None,
    }
    return json.dumps(data, indent=1)


def _heaviest(config: Config, plan: RunPlan) -> str:
    named = name_ranks(plan.heaviest, config.parallel.pp > 1)
    return f"{named}, all alike" if len(plan.kinds) == 1 else f"{named} ({len(plan.kinds)} kinds of rank)"


def _model(plan: RunPlan) -> str:
    return (
        f"{plan.parameters:,} parameters, {plan.muon_parameters:,} of them Muon's, "
        f"{plan.adam_parameters:,} Adam's"
    )


def _chunks(on_disk: int, total: int) -> str:
    return counted(on_disk, "chunk") if on_disk == total else f"{on_disk} of {total} chunks"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _rooms(config: Config, plan: RunPlan, fit: Fit) -> Iterator[str]:
    """Say how ranks share the directories, and yield a line for each filesystem."""
    if shared := describe(len(config.offload.directory or ()), config.launcher.ranks_per_node):
        yield shared
    if fit.free_bytes is None:
        cluster = config.cluster.name
        yield f"{format_bytes(fit.needed_bytes)} needed; the drives of cluster={cluster} are not known"
    for room in fit.rooms:
        needed = room.state_bytes(plan)
        text = f"{room.names}: {format_bytes(room.mount.free_bytes)} free, {format_bytes(needed)} needed"
        checkpoints = f", {format_bytes(needed + room.checkpoint_bytes)} with checkpoints"
        yield text + (checkpoints if room.checkpoint_bytes else "")


def _wait(plan: RunPlan, bandwidth: Bandwidth | None, cost: StepCost | None) -> str:
    if not plan.heaviest_node.each_way_bytes:
        return "for no drive"
    if bandwidth is None or cost is None:
        return "not known: give --bandwidth READ,WRITE or run muon-offload bench-disk DIRECTORY"
    rates = f"{_rate(bandwidth.read)} GB/s read, {_rate(bandwidth.written)} written ({bandwidth.source})"
    behind = "can pass" if cost.compute_s is None else "passes"
    return (
        f"at least {_seconds(cost.floor_s)} for the drive at {rates}; "
        f"{_seconds(cost.behind_s)} of it {behind} behind forward and backward, "
        f"{_seconds(cost.exposed_s)} cannot"
    )


def _rate(value: float) -> str:
    return f"{value / GB:.2f}" if value >= GB / 10 else f"{value / GB:.2g}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
