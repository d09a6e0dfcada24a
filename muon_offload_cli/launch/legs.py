"""The three legs of a rehearsal: straight through, killed on the way, resumed from what was saved. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.records import RankReport

SAVE_EVERY = 2
KILL_AT = 3
"""After the first save, before the end."""


def straight_leg(config: Config, scratch: Path) -> Config:
    """Return the run that nothing interrupts and nothing saves.

    Args:
        config: The shrunk run, with its own steps.
        scratch: Existing folder that everything of the rehearsal stays in.
    """
    leg = copy.deepcopy(config)
    leg.run.directory = str(scratch / "straight")
    leg.run.digest = True
    num_directories = len(leg.offload.directory or [None])
    leg.offload.directory = [str(scratch / f"state_{number}") for number in range(num_directories)]
    leg.checkpoint = type(leg.checkpoint)()
    leg.resume = type(leg.resume)()
    return leg


def killed_leg(config: Config, scratch: Path) -> Config:
    """Return the run that saves, and is killed at step `KILL_AT`."""
    leg = straight_leg(config, scratch)
    leg.run.directory = str(scratch / "killed")
    leg.checkpoint.directory = str(scratch / "checkpoints")
    leg.checkpoint.interval = SAVE_EVERY
    return leg


def resumed_leg(config: Config, scratch: Path) -> Config:
    """Return the run that goes on from the first checkpoint of the killed one."""
    leg = straight_leg(config, scratch)
    leg.run.directory = str(scratch / "resumed")
    leg.resume.source = str(scratch / "checkpoints")
    # There may be a later one: steps of a small model can outrun the kill.
    leg.resume.step = SAVE_EVERY
    return leg


def shortfalls(config: Config, reports: Mapping[int, RankReport], *, steps: int) -> list[str]:
    """Say which ranks did not take their steps from the engine, or did not end.

    Args:
        config: The leg.
        reports: Of its ranks, by number.
        steps: Steps that this leg had to take.
    """
    found = []
    for rank in range(config.launcher.ranks_per_node):
        report = reports.get(rank)
        if report is None or not report.finished:
            found.append(f"rank {rank} did not finish")
        elif report.steps != steps:
            found.append(f"rank {rank} took {report.steps} of {steps} steps")
        elif config.offload.engine is not Engine.none and report.muon_parameters:
            if report.engine != config.offload.engine.name:
                found.append(f"rank {rank} kept its state in {report.engine}")
            elif report.steps_from_backend != steps:
                found.append(f"rank {rank} took {report.steps_from_backend} of {steps} steps from the engine")
    return found


def differences(straight: Mapping[int, RankReport], resumed: Mapping[int, RankReport]) -> list[str]:
    """Say in which hashes the resumed run differs from the straight one at its end."""
    return [
        f"rank {rank}: {kind} differ"
        for rank, report in sorted(straight.items())
        for kind, digest in sorted(report.digests.items())
        if rank not in resumed or resumed[rank].digests.get(kind) != digest
    ]
