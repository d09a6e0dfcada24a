"""Whether a run did what was asked for: every step, on every rank, from the backend asked for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.launch.figures import RankFigures
from muon_offload_cli.records import RankReport
from muon_offload_cli.units import format_bytes

TRAINING_FAILED = 4
STOPPED_EARLY = 5
"""All ranks saved and ended before the last step, because they were asked to."""

_PLACES = {
    Engine.none: "resident, as asked",
    Engine.host: "state in host memory",
    Engine.mapped: "state on disk",
    Engine.disk: "state on disk",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankVerdict:
    """One row of the table that ends a run.

    Attributes:
        rank: Global rank.
        fine: Whether this rank did what was asked for.
        verdict: ``fine``, or the reason why it is not, as a phrase.
        detail: What a person should know although the rank is fine; may be empty.
        engine: Backend that the rank attached.
        steps: Optimizer steps taken.
        steps_from_backend: Steps whose Muon state came from that backend.
        disk_bytes: Muon state on disk, alignment included.
        host_bytes: Muon state in host memory.
        gpu_bytes: Muon state on the training device between steps.
        adam_state_bytes: State of the sibling optimizers that stays on the training device.
        adam_disk_bytes: State of theirs that lies on disk.
        directory: Where its bytes on disk are.
    """

    rank: int
    fine: bool
    verdict: str
    detail: str = ""
    engine: str = "none"
    steps: int = 0
    steps_from_backend: int = 0
    disk_bytes: int = 0
    host_bytes: int = 0
    gpu_bytes: int = 0
    adam_state_bytes: int = 0
    directory: str = ""
    adam_disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judgement of a whole run (of this node's ranks).

    Attributes:
        success: Whether the run may exit 0.
        exit_code: 0, 4, or 5 for a run that saved and ended early on request.
        headline: One line, ``4 of 4 ranks: state on disk (12.34 MiB)``.
        ranks: One row a rank, in order.
    """

    success: bool
    exit_code: int
    headline: str
    ranks: list[RankVerdict]


def judge(
    config: Config,
    reports: Mapping[int, RankReport],
    figures: Mapping[int, RankFigures],
    *,
    ranks: Sequence[int],
    exit_code: int,
    endings: Mapping[int, str] | None = None,
) -> Verdict:
    """Judge a run from what its ranks reported and, independently, from their step records.

    Args:
        config: What was asked for.
        reports: Last report of each rank that wrote one.
        figures: Sums of each rank's step records.
        ranks: Ranks that this node started.
        exit_code: Of torchrun.
        endings: How ranks died, as far as a post-mortem could tell.
    """
    told = endings or {}
    rows = [
        _judge_rank(config, rank, reports.get(rank), figures.get(rank), told.get(rank, "")) for rank in ranks
    ]
    idle = all(report.muon_parameters == 0 for report in reports.values())
    fine = all(row.fine for row in rows)
    # A node of many may own no matrix; a whole run without one did not do what was asked for.
    nothing_to_move = fine and idle and config.launcher.nodes == 1 and _moves(config)
    stopped = {report.stopped_at for report in reports.values() if report.stopped_at < config.train.steps}
    early = max(stopped, default=0) if fine and exit_code == 0 else 0
    success = fine and exit_code == 0 and not nothing_to_move and not early
    headline = _headline(config, rows, told)
    if nothing_to_move:
        headline = (
            f"0 of {len(rows)} ranks moved anything: the model has no parameters that Muon owns, "
            f"and offload.engine={config.offload.engine.name} was asked for"
        )
    elif fine and exit_code != 0:
        headline += f", but torchrun exited with {exit_code}"
    if early:
        headline = (
            f"saved and ended after step {early} of {config.train.steps}, as asked; resume=auto goes on"
        )
    failed = STOPPED_EARLY if early else TRAINING_FAILED
    return Verdict(success=success, exit_code=0 if success else failed, headline=headline, ranks=rows)


def _moves(config: Config) -> bool:
    return config.offload.engine is not Engine.none and config.offload.fraction > 0


def _judge_rank(
    config: Config, rank: int, report: RankReport | None, figures: RankFigures | None, ending: str
) -> RankVerdict:
    if report is None:
        return RankVerdict(rank=rank, fine=False, verdict=ending or "wrote no report")
    fault = _fault(config, report, figures)
    if ending:
        fault = f"{ending}: {figures.steps if figures else 0} of {config.train.steps} steps"
    detail = ""
    if _moves(config) and report.muon_parameters == 0:
        detail = "no Muon parameters"
    return RankVerdict(
        rank=rank,
        fine=not fault,
        verdict=fault or "fine",
        detail=detail,
        engine=report.engine,
        steps=max(report.steps, figures.steps if figures else 0),
        steps_from_backend=_from_backend(report, figures),
        disk_bytes=report.disk_bytes,
        host_bytes=report.host_bytes,
        gpu_bytes=report.gpu_bytes,
        adam_state_bytes=report.adam_state_bytes,
        directory=report.directory,
        adam_disk_bytes=report.adam_disk_bytes,
    )


def _from_backend(report: RankReport, figures: RankFigures | None) -> int:
    """Return the count of the report, which a rank that did not finish never brought up to date."""
    if report.finished or figures is None or report.engine == Engine.none.name:
        return report.steps_from_backend
    return figures.steps_by_engine.get(report.engine, 0)


def _fault(config: Config, report: RankReport, figures: RankFigures | None) -> str:
    """Return why a rank is not fine, empty if it is."""
    wanted = config.train.steps
    steps = max(report.steps, figures.steps if figures else 0)
    if report.error or report.problems:
        return f"failed after {steps} of {wanted} steps"
    if not report.finished:
        return f"did not finish: {steps} of {wanted} steps"
    # A resumed run takes only the steps that its checkpoint has not.
    if report.stopped_at:
        return _memory_fault(config, report, figures) if _moves(config) and report.muon_parameters else ""
    if report.steps > wanted or (report.steps < wanted and config.resume.source is None):
        return f"finished after {report.steps} of {wanted} steps"
    if config.resume.source is not None and report.last_step < wanted:
        return f"finished at step {report.last_step} of {wanted}"
    if not _moves(config) or report.muon_parameters == 0:
        return ""
    return _memory_fault(config, report, figures)


def _memory_fault(config: Config, report: RankReport, figures: RankFigures | None) -> str:
    engine = config.offload.engine.name
    kept = "kept its state in memory"
    if report.engine != engine:
        return f"{kept}: offload.engine={engine} was asked for, {report.engine} was attached"
    if report.steps_from_backend != report.steps:
        return f"{kept}: {report.steps_from_backend} of {report.steps} steps from {engine}"
    if figures is not None and figures.steps != (shown := figures.steps_by_engine.get(engine, 0)):
        # The records are written step by step, the report counts them: they must not disagree.
        return f"{kept}: its metrics show {shown} of {figures.steps} steps from {engine}"
    on_disk, in_host = report.disk_bytes, report.host_bytes
    if config.offload.engine is Engine.host and in_host == 0:
        return f"{kept}: no bytes in host memory"
    if (
        config.offload.engine in (Engine.disk, Engine.mapped)
        and on_disk == 0
        and not _host_tier(config, in_host)
    ):
        return f"{kept}: no bytes on disk"
    if config.offload.fraction >= 1 and on_disk + in_host < report.muon_state_bytes:
        left = format_bytes(report.muon_state_bytes - on_disk - in_host)
        return f"kept {left} of its {format_bytes(report.muon_state_bytes)} state in memory"
    return ""


def _host_tier(config: Config, host_bytes: int) -> bool:
    """Whether a budget of host memory was given that may hold everything."""
    return host_bytes > 0 and config.offload.host_memory_gib != 0


def _headline(config: Config, rows: list[RankVerdict], died: Collection[int]) -> str:
    good = [row for row in rows if row.fine]
    # Where a rank died, the others only stopped because of it.
    bad = [row for row in rows if row.rank in died] or [row for row in rows if not row.fine]
    told = f"{len(good)} of {len(rows)} ranks" + (
        f": {_where(config, good)}" if good else " did what was asked for"
    )
    by_fault: dict[str, list[RankVerdict]] = {}
    for row in bad:
        by_fault.setdefault(row.verdict.partition(":")[0], []).append(row)
    asides = []
    for fault, group in by_fault.items():
        same = len({row.verdict for row in group}) == 1
        asides.append(f"{_names(group)} {group[0].verdict if same else fault}")
    idle = [row for row in good if row.detail]
    if idle:
        asides.append(f"{_names(idle)} without Muon parameters")
    return "; ".join([told, *asides])


def _names(rows: list[RankVerdict]) -> str:
    numbers = [str(row.rank) for row in rows]
    shown = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(rows) == 1 else f"ranks {shown}"


def _where(config: Config, rows: list[RankVerdict]) -> str:
    if not _moves(config):
        return (
            _PLACES[Engine.none]
            if config.offload.engine is Engine.none
            else "offload.fraction=0 moved nothing"
        )
    disk, host = sum(row.disk_bytes for row in rows), sum(row.host_bytes for row in rows)
    if config.offload.engine is Engine.host:
        return f"{_PLACES[Engine.host]} ({format_bytes(host)})"
    text = f"{_PLACES[config.offload.engine]} ({format_bytes(disk)})"
    return f"{text} and in host memory ({format_bytes(host)})" if host else text
