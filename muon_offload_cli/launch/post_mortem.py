"""Why a job died: the first rank that did, what ended it, and what usually does. Pure, on texts.

One rank's death makes all others fail, a moment later and with more words: torchrun ends them, their
collectives lose a peer or time out. Nothing of that is a cause, and none of it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muon_offload_cli.errors import Problem
from muon_offload_cli.launch.cause import MachineFigures, likely_cause
from muon_offload_cli.launch.last_words import last_words, without_warnings
from muon_offload_cli.launch.torchrun_log import RankExit, early_output, rank_exits
from muon_offload_cli.records import RankReport

# What gloo, NCCL and torch's store say when a peer is gone.
_SECONDARY = re.compile(
    r"connection (?:closed|reset) by peer|connection was closed|connection closed by remote|broken pipe"
    r"|connection refused|recvValue failed|DistNetworkError|DistStoreError|failed to recv"
    r"|(?:watchdog|collective operation) timeout|timed out waiting \d+ ?ms for (?:recv|send)|wait timeout"
    r"|ncclRemoteError|remote process exited|ncclSystemError|DistBackendError|socket timeout|aborted due to",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PostMortem:
    """Why a job died.

    Attributes:
        rank: The rank that died first; None if no rank could be named.
        what: One sentence: which rank, of what, at which step.
        ending: How that rank ended, as a phrase: ``died of signal 9 (SIGKILL)``.
        cause: The likely cause and what to do about it; may be empty.
        log: File that has the whole story.
        last_lines: End of that rank's log, without warnings; may be empty.
        problems: The user errors that stopped the run, each once; empty if anything else did.
    """

    rank: int | None
    what: str
    ending: str = ""
    cause: str = ""
    log: Path | None = None
    last_lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """4, or the exit code of the user errors if nothing else failed."""
        return max((problem.exit_code for problem in self.problems), default=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Everything that is known of a dead job.

    Attributes:
        ranks: Ranks that this node started.
        total_steps: Steps that were asked for.
        torchrun_log: Its text, or the end of it.
        torchrun_log_path: Its path.
        rank_logs: Text of each rank's log, or the end of it.
        rank_log_paths: Their paths.
        reports: Last report of each rank that wrote one.
        steps: Steps that each rank has recorded.
        gave_up: The launcher ended a job that would not end by itself.
        machine: Figures of the machine.
    """

    ranks: Sequence[int]
    total_steps: int
    torchrun_log: str
    torchrun_log_path: Path
    rank_logs: Mapping[int, str]
    rank_log_paths: Mapping[int, Path]
    reports: Mapping[int, RankReport]
    steps: Mapping[int, int]
    gave_up: bool = False
    machine: MachineFigures = field(default_factory=MachineFigures)


def explain(evidence: Evidence) -> PostMortem:
    """Name the first rank that died, why, and where to read on."""
    exits = rank_exits(evidence.torchrun_log, first_rank=min(evidence.ranks, default=0))
    suspects = _suspects(evidence, exits)
    problems = _user_errors(evidence, suspects)
    if not suspects:
        return _torchrun_died(evidence)
    rank, seen = suspects[0]
    report = evidence.reports.get(rank)
    text = evidence.rank_logs.get(rank, "")
    lines, log = last_words(without_warnings(text), rank), evidence.rank_log_paths.get(rank)
    early = early_output(evidence.torchrun_log)
    if not text.strip() and early:
        # It died before it had a log of its own (an import that fails, for example).
        lines, log = last_words(without_warnings(early), rank), evidence.torchrun_log_path
    ending = _ending(seen, report, lines)
    taken = evidence.steps.get(rank, 0)
    where = f"after step {taken} of {evidence.total_steps}" if taken else "before its first step"
    if evidence.gave_up:
        where += "; the launcher ended the rest, which did not end by itself"
    return PostMortem(
        rank=rank,
        what=f"rank {rank} {ending}, {where}.",
        ending=ending,
        cause=likely_cause(seen, "\n".join([report.error if report else "", *lines]), evidence.machine),
        log=log,
        last_lines=lines,
        problems=problems,
    )


def _suspects(evidence: Evidence, exits: Sequence[RankExit]) -> list[tuple[int, RankExit | None]]:
    """Return the ranks that may have died first, the most likely one at the head.

    Signals come first, because a rank that got one cannot have been told of another's death; then
    errors of its own; then errors that speak of a lost peer. Torchrun's order decides among equals.
    """
    by_rank = {item.rank: item for item in exits}
    failed = [item.rank for item in exits if not item.ended_by_torchrun]
    failed += [rank for rank, report in sorted(evidence.reports.items()) if report.error or report.problems]
    if not failed and evidence.gave_up:
        failed = [rank for rank in evidence.ranks if not _finished(evidence, rank)]
    ranks = list(dict.fromkeys(failed))

    def weight(rank: int) -> int:
        seen, report = by_rank.get(rank), evidence.reports.get(rank)
        own_words = (
            report.error
            if report and report.error
            else "\n".join(last_words(evidence.rank_logs.get(rank, ""), rank))
        )
        if report and report.problems:
            return 1
        if _SECONDARY.search(own_words) and not (
            seen and seen.signal_name in ("SIGKILL", "SIGBUS", "SIGSEGV")
        ):
            return 2
        return 0 if seen and seen.signal_name else 1

    return [(rank, by_rank.get(rank)) for rank in sorted(ranks, key=weight)]


def _finished(evidence: Evidence, rank: int) -> bool:
    report = evidence.reports.get(rank)
    return report is not None and report.finished


def _user_errors(evidence: Evidence, suspects: Sequence[tuple[int, RankExit | None]]) -> list[Problem]:
    """Return the user errors if every rank that failed on its own account had one."""
    found: dict[tuple[str, str], Problem] = {}
    for rank, seen in suspects:
        report = evidence.reports.get(rank)
        if report is not None and report.problems:
            for problem in report.problems:
                read = _problem(problem)
                found.setdefault((read.what, read.fix), read)
        elif (seen is not None and seen.signal_name) or not _lost_a_peer(report):
            return []
    return list(found.values())


def _lost_a_peer(report: RankReport | None) -> bool:
    return report is not None and _SECONDARY.search(report.error) is not None


def _problem(data: Mapping[str, Any]) -> Problem:
    return Problem(
        what=str(data.get("what", "")), fix=str(data.get("fix", "")), exit_code=int(data.get("exit_code", 2))
    )


def _ending(seen: RankExit | None, report: RankReport | None, lines: Sequence[str]) -> str:
    if seen is not None and seen.signal_name and not seen.ended_by_torchrun:
        return f"died of signal {-seen.exit_code} ({seen.signal_name})"
    if report is not None and report.error:
        return f"failed with {report.error.splitlines()[0]}"
    raised = next(
        (line for line in reversed(lines) if re.match(r"[\w.]*(?:Error|Exception|Interrupt)\b", line)), ""
    )
    if raised:
        return f"failed with {raised}"
    if seen is None:
        return "did not end by itself after a failure"
    return f"exited with code {seen.exit_code}"


def _torchrun_died(evidence: Evidence) -> PostMortem:
    return PostMortem(
        rank=None,
        what="torchrun ended before any rank said why.",
        log=evidence.torchrun_log_path,
        last_lines=last_words(evidence.torchrun_log, -1),
    )
