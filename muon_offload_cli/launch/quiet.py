"""Noticing a job that stands still, and the rank that it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from muon_offload_cli.launch.figures import RankFigures
from muon_offload_cli.records import RankReport

LONG_STEPS = 5
"""A job is quiet only after so many times its longest step so far: a save or a slow drive takes its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quiet:
    """No rank of this node has finished a step for a while.

    Attributes:
        seconds: How long.
        stopped: Process ids of ranks that were stopped and do not run, by rank.
        steps: Steps that each rank has taken.
    """

    seconds: float
    stopped: Mapping[int, int]
    steps: Mapping[int, int]

    def __str__(self) -> str:
        """Say which rank the others wait for, as far as can be seen from outside."""
        head = f"no step for {self.seconds:.0f} s: "
        if self.stopped:
            ranks = ", ".join(f"rank {rank} (process {pid})" for rank, pid in self.stopped.items())
            pids = " ".join(map(str, self.stopped.values()))
            return f"{head}{ranks} was stopped, as by SIGSTOP; kill -CONT {pids} lets it go on"
        most = max(self.steps.values())
        behind = [f"rank {rank} has taken {steps}" for rank, steps in self.steps.items() if steps < most]
        return head + (f"{', '.join(behind)} of {most} steps" if behind else f"all ranks wait at step {most}")


class QuietWatch:
    """Tells once each time a job stands still.

    Args:
        figures: Steps of every rank, kept up to date by the caller.
        reports: Reports of the ranks, likewise.
        quiet_s: Seconds without a step that are worth a word.
    """

    def __init__(
        self, figures: Mapping[int, RankFigures], reports: Mapping[int, RankReport], quiet_s: float
    ) -> None:
        self._figures = figures
        self._reports = reports
        self._quiet_s = quiet_s
        self._steps: dict[int, int] = {}
        self._since = 0.0
        self._longest_s = 0.0
        self._told = False

    def look(self, now: float) -> Iterator[Quiet]:
        """Yield a notice if the job has been quiet for long, at most one until it moves again.

        Before the first step, which may take long to reach, only a stopped process is told.
        """
        steps = {rank: figures.steps for rank, figures in self._figures.items()}
        if steps != self._steps:
            if any(self._steps.values()):
                self._longest_s = max(self._longest_s, now - self._since)
            self._steps, self._since, self._told = steps, now, False
        quiet_s = now - self._since
        if self._told or quiet_s < max(self._quiet_s, LONG_STEPS * self._longest_s):
            return
        stopped = {rank: each.pid for rank, each in sorted(self._reports.items()) if _is_stopped(each)}
        if stopped or any(steps.values()):
            self._told = True
            yield Quiet(seconds=quiet_s, stopped=stopped, steps=steps)


def _is_stopped(report: RankReport) -> bool:
    if report.finished or report.pid <= 0:
        return False
    try:
        return psutil.Process(report.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
