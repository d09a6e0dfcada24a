"""``muon-offload disk-plan``: what a run will put where, whether it fits, and what a step will wait for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muon_offload_cli.cli.check_config import Here, RecipeDirectories, Words
from muon_offload_cli.cli.problems import another_place
from muon_offload_cli.errors import command, wrong

if TYPE_CHECKING:
    from muon_offload_cli.config.schema import Config
    from muon_offload_cli.planner.cost import Bandwidth
    from muon_offload_cli.planner.fit import Fit
    from muon_offload_cli.planner.plan import Planner, RunPlan

PICTURES = (".svg", ".html", ".png")


def disk_plan(
    words: Words = None,
    recipe_dir: RecipeDirectories = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, sizes in bytes.")] = False,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Build Megatron's modules too, and compare tensor by tensor."),
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", metavar="0,3", help="Ranks for --exact; one of each kind by default."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bandwidth", metavar="READ,WRITE", help="What a node's drives move, in GB/s."),
    ] = None,
    forward_backward: Annotated[
        float | None,
        typer.Option(
            "--forward-backward", metavar="SECONDS", help="What a step takes outside the optimizer."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="FOLDER", help="An earlier run whose metrics say so."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the plan: .svg, .html or .png.")
    ] = None,
    here: Here = False,
) -> None:
    """Plan a run byte for byte without starting it.

    Exits with 0 (fits), 1 (--exact found a difference), 2 (the request is wrong) or 3 (it does not fit).
    """
    from muon_offload_cli.cli.disk_plan_view import as_json, figures, show
    from muon_offload_cli.cli.exact import compare_with_megatron
    from muon_offload_cli.planner.cost import parse_bandwidth, step_cost

    if ranks is not None and not exact:
        raise wrong(f"--ranks {ranks} is read with --exact alone.", command("--exact", "--ranks", ranks))
    given = parse_bandwidth(bandwidth) if bandwidth is not None else None
    compute = _compute_seconds(forward_backward, run)
    _check_plot(plot)
    config, planner, remarks, judged = _prepare(words or [], recipe_dir or [], here)
    plan = planner.plan()
    fit = _fit(config, planner, plan, judged)
    known = given or _known_bandwidth(config, judged)
    cost = step_cost(plan.heaviest_node, known, compute) if known is not None else None
    differences = compare_with_megatron(config, planner, ranks) if exact else None
    lines = figures(config, plan, fit, known, cost)
    if plot is not None:
        _draw(plot, plan, f"muon-offload disk-plan recipe={config.recipe}", lines)
    if json:
        typer.echo(as_json(config, plan, fit, known, cost, differences))
    else:
        show(plan, fit, lines, remarks, differences)
    if differences is not None and differences.found:
        raise typer.Exit(1)
    raise typer.Exit(0 if fit.fits else 3)


def _prepare(
    words: list[str], directories: list[Path], here: bool
) -> tuple[Config, Planner, list[object], bool]:
    """Compose, refuse what check-config refuses, and take the inventory.

    Args:
        words: Recipe and overrides.
        directories: Folders of the user's own recipes.
        here: See ``--here``.

    Returns:
        Config, planner, remarks of the rules, and whether this machine is the one that is judged.
    """
    from muon_offload_cli.cli.planning import planner_of
    from muon_offload_cli.cli.prepare import judge
    from muon_offload_cli.config.gathering import resolve_directory

    # Room on the drive is judged below, with the plan.
    judged = judge(words, directories, here=here, room=False)
    judged.refuse()
    config = resolve_directory(judged.config)
    return config, planner_of(config), list(judged.problems), judged.here


def _fit(config: Config, planner: Planner, plan: RunPlan, judged: bool) -> Fit:
    from muon_offload_cli.cli.planning import checkpoints_to_come, headroom_bytes
    from muon_offload_cli.machine.drives import local_mounts
    from muon_offload_cli.machine.filesystem import inspect
    from muon_offload_cli.planner.fit import judge_fit
    from muon_offload_cli.planner.settings import offload_settings
    from muon_offload_cli.planner.space import NodeSpace, cluster_space

    settings = offload_settings(config)
    if not judged:
        return judge_fit(plan, cluster_space(config), settings, planner.plan)
    directories = config.offload.directory if plan.heaviest_node.disk_bytes else None
    saved = config.checkpoint.directory
    space = NodeSpace(
        mounts=[inspect(Path(directory)) for directory in directories or ()],
        others=local_mounts(),
        headroom_bytes=headroom_bytes(),
        coming=checkpoints_to_come(config),
        keep=config.checkpoint.keep,
        checkpoint_mount=None if saved is None else inspect(Path(saved).absolute()),
    )
    return judge_fit(plan, space, settings, planner.plan)


def _known_bandwidth(config: Config, judged: bool) -> Bandwidth | None:
    """Return what was measured of the directories' filesystems, else what the cluster's file says."""
    from muon_offload_cli.machine.drives import recall
    from muon_offload_cli.machine.filesystem import inspect
    from muon_offload_cli.planner.cost import GB, Bandwidth

    cluster = config.cluster
    mounts = [inspect(Path(directory)) for directory in config.offload.directory or ()] if judged else []
    points = {mount.device: mount.mount_point for mount in mounts}
    records = [record for point in points.values() if (record := recall(point)) is not None]
    if records and len(records) == len(points):
        # Equal parts: all together are as fast as their number times the slowest.
        read, written = (min(rates) for rates in zip(*((r.read, r.written) for r in records), strict=True))
        where = ", ".join(record.mount_point for record in records)
        source = f"measured on {where}, {min(record.measured for record in records)[:10]}"
        return Bandwidth(read=len(records) * read, written=len(records) * written, source=source)
    if cluster.read_gb_s and cluster.write_gb_s:
        return Bandwidth(
            read=cluster.read_gb_s * GB, written=cluster.write_gb_s * GB, source=f"cluster={cluster.name}"
        )
    return None


def _compute_seconds(given: float | None, run: Path | None) -> float | None:
    from muon_offload_cli.planner.seen import compute_seconds

    if given is not None and not 0 <= given < float("inf"):
        raise wrong(f"--forward-backward {given:g} is no time in seconds.", "--forward-backward 2.5")
    if given is not None and run is not None:
        raise wrong("--forward-backward and --run say the same thing twice.", "leave one of them out")
    return compute_seconds(run) if run is not None else given


def _check_plot(plot: Path | None) -> None:
    import importlib.util

    if plot is None:
        return
    if plot.suffix not in PICTURES:
        raise wrong(
            f"--plot {plot}: the name must end in {', '.join(PICTURES)}.",
            command("--plot", f"{plot.stem or 'plan'}.svg"),
        )
    if not plot.parent.is_dir():
        raise wrong(f"--plot {plot}: there is no folder {plot.parent}.", another_place("--plot", plot))
    if plot.suffix == ".png" and importlib.util.find_spec("cairosvg") is None:
        raise wrong(
            f"--plot {plot}: PNG needs the package cairosvg, which is not installed.",
            command("--plot", plot.with_suffix(".svg")) + ", or: pip install cairosvg",
        )


def _draw(plot: Path, plan: RunPlan, title: str, lines: list[tuple[str, str]]) -> None:
    from muon_offload_cli.planner.picture import html, svg

    try:
        if plot.suffix == ".png":
            import importlib

            importlib.import_module("cairosvg").svg2png(
                bytestring=svg(plan, title).encode(), write_to=str(plot)
            )
        else:
            drawn = html(plan, title, lines) if plot.suffix == ".html" else svg(plan, title)
            plot.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise wrong(
            f"--plot {plot} cannot be written: {error.strerror}.", another_place("--plot", plot)
        ) from error
