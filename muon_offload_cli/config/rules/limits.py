"""Limits of a process: what shell, scheduler and kernel allow a rank."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Level, Problem
from muon_offload_cli.machine.limits import COMMON_OPEN_FILES, FILE_SIZE, UNLIMITED_FILES, judge_limits
from muon_offload_cli.units import format_bytes


@rule(
    name="process-limits",
    reason="Every rank would die at its first file or mapping too many, with the words of some library.",
    machine=True,
)
def process_limits(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse limits under which no rank can train; note low ones."""
    for limit in judge_limits(facts.limits, enough_files=COMMON_OPEN_FILES):
        if limit.name == FILE_SIZE:
            continue  # What that allows depends on the run.
        if limit.stops:
            yield Problem(
                what=f"this shell limits the {limit.name} of each process to {limit.found}: no rank can "
                "start under that.",
                fix=limit.fix,
                exit_code=3,
            )
        elif limit.fix:
            yield Problem(
                what=f"{limit.name}: each process is limited to {limit.found}, which a rank may exceed.",
                fix=limit.fix,
                level=Level.NOTE,
            )


@rule(
    name="file-size-limit",
    reason="A rank reserves all its state in one file, which no other folder can make smaller.",
    machine=True,
)
def file_size_limit(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a limit on file sizes below what a rank reserves; note any other."""
    limit, ranks = facts.limits.file_bytes, config.launcher.ranks_per_node
    if limit is None:
        return
    # The mean over all ranks, which the largest file of a rank in that directory is not below.
    needed = max(facts.planned.directory_bytes, default=0) // max(1, ranks)
    told = f"this shell limits files to {format_bytes(limit)}"
    if limit < needed:
        yield Problem(
            what=f"{told}, and a rank reserves one of {format_bytes(needed)} or more.",
            fix=UNLIMITED_FILES,
            exit_code=3,
        )
    else:
        yield Problem(
            what=f"{told}, which files of a checkpoint may exceed.", fix=UNLIMITED_FILES, level=Level.NOTE
        )
