"""Following the rank files of a run while the ranks write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muon_offload_cli.launch.figures import RankFigures, StepSeen, merge
from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.launch.quiet import Quiet
from muon_offload_cli.launch.tail import Tail
from muon_offload_cli.records import RankReport, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReported:
    """A rank wrote or rewrote its report: at start, after attaching, at the end."""

    report: RankReport


type Event = StepSeen | RankReported | Quiet


class Follower:
    """Reads what is new in every rank's metrics and report.

    Attributes:
        figures: Sums per rank; every rank followed has an entry.
        reports: Newest report of each rank that wrote one.
    """

    def __init__(self, folder: RunFolder, ranks: Sequence[int]) -> None:
        self.figures = {rank: RankFigures() for rank in ranks}
        self.reports: dict[int, RankReport] = {}
        self._folder = folder
        self._tails = {rank: Tail(path=folder.rank_metrics(rank)) for rank in ranks}
        self._texts: dict[int, str] = {}
        self._pending: dict[int, dict[int, StepRecord]] = {}

    def poll(self) -> Iterator[Event]:
        """Yield what happened since the last call; a step is yielded once all ranks have it."""
        for rank in self._tails:
            report = self._changed_report(rank)
            if report is not None:
                self.reports[rank] = report
                yield RankReported(report=report)
        for rank, tail in self._tails.items():
            for line in tail.new_lines():
                self._take(rank, line)
        for step in sorted(self._pending):
            if len(self._pending[step]) == len(self._tails):
                yield merge(list(self._pending.pop(step).values()))

    def _changed_report(self, rank: int) -> RankReport | None:
        try:
            # Read each time: a file replaced twice in a clock tick can have the number and time it had.
            text = self._folder.rank_report(rank).read_text()
            if self._texts.get(rank) == text:
                return None
            report = RankReport.from_json(text)
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            # Not there yet, or (on a file system without atomic renames) not whole yet.
            return None
        self._texts[rank] = text
        return report

    def _take(self, rank: int, line: str) -> None:
        if not line.strip():
            return
        try:
            record = StepRecord.from_json(line)
        except (json.JSONDecodeError, TypeError, AttributeError):
            return
        self.figures[rank].add(record)
        self._pending.setdefault(record.step, {})[rank] = record
