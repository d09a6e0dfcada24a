"""Saving and resuming: settings that contradict each other, and flags that save another way."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Set
from pathlib import Path

from muon_offload_cli.config.locations import from_home
from muon_offload_cli.config.rules.directory import FOLDERS, PSEUDO_KINDS
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import conflicting_flags
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem
from muon_offload_cli.units import format_bytes

UNSERVED: dict[str, str] = {
    "async_save": "a checkpoint is sealed when its save returns, and the next step moves the state",
    "async_ckpt_use_cpu_shm": "a checkpoint is sealed when its save returns",
    "non_persistent_save_interval": "such a checkpoint is not sealed",
    "non_persistent_ckpt_type": "such a checkpoint is not sealed",
    "no_ckpt_fully_parallel_save": "the first rank of each group would write what all hold",
}


@rule(name="checkpoint-numbers", reason="Deleting all checkpoints is never meant.")
def numbers(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Demand a sensible number of checkpoints to keep and of the step to load."""
    for key, value in (("checkpoint.keep", config.checkpoint.keep), ("resume.step", config.resume.step)):
        if value is not None and value < 1:
            yield Problem(what=f"{key}={value}: it counts from 1.", fix=f"{key}=null", keys=(key,))


@rule(
    name="experts-saved-twice",
    reason="Megatron lets every tensor-parallel rank write these experts' state, and then refuses the save.",
)
def experts_saved_twice(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse to save optimizer state where whole experts lie on every tensor-parallel rank."""
    parallel, saving = config.parallel, config.checkpoint
    etp = parallel.tp if parallel.etp is None else parallel.etp
    if saving.directory is None or not saving.optimizer or config.model.moe.num_experts is None:
        return
    if parallel.ep == 1 and etp < parallel.tp:
        yield Problem(
            what=f"checkpoint.directory with parallel.ep=1 and parallel.etp={etp} below "
            f"parallel.tp={parallel.tp}: every tensor-parallel rank would write the same experts' state, "
            "and the save fails.",
            fix=f"parallel.etp={parallel.tp}",
            keys=("checkpoint.directory", "parallel.etp", "parallel.tp", "parallel.ep"),
        )


@rule(name="checkpoint-nowhere", reason="Without a directory there is nothing to go on from.")
def nowhere(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse to go on from checkpoints that have no place."""
    if config.checkpoint.directory is not None:
        return
    source = config.resume.source or ""
    if source == "auto" or source.isdecimal():
        yield Problem(
            what=f"resume={source} looks below checkpoint.directory, which is not set.",
            fix="checkpoint.directory=/the/folder/of/the/run",
            keys=("resume.source", "checkpoint.directory"),
        )


@rule(name="checkpoint-apart", reason="A run's own folder must be empty when it begins.")
def apart(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse checkpoints in the run's own folder: no other run could go on from them there."""
    saving, own = config.checkpoint.directory, config.run.directory
    if not saving or not own:
        return
    folder, inside = (Path(os.path.normpath(Path.cwd() / from_home(given))) for given in (own, saving))
    if config.launcher.nodes > 1:
        folder /= f"node_{config.launcher.node_rank}"
    if inside.is_relative_to(folder):
        yield Problem(
            what=f"checkpoint.directory={saving} is in run.directory={own}, which must be empty when a run "
            "begins: the run that goes on from these checkpoints would be refused.",
            fix="run.directory=null",
            keys=("run.directory", "checkpoint.directory"),
        )


@rule(name="weights-only", reason="A new run that saves among another's checkpoints mixes the two.")
def weights_only(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Demand a source of its own for a run that begins from weights."""
    if not config.resume.weights_only:
        return
    source = config.resume.source
    if source in (None, "none", "auto") or source.isdecimal() or source == config.checkpoint.directory:
        yield Problem(
            what=f"resume.weights_only=true with resume={source or 'none'}: a new run that begins from "
            "weights needs the path of another run's checkpoint.",
            fix="resume.source=/path/to/other/checkpoints",
            keys=("resume.weights_only", "resume.source"),
        )


@rule(name="checkpoint-flags", reason="These flags save in ways that no seal covers.")
def unserved_flags(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse Megatron flags that write checkpoints another way."""
    if config.checkpoint.directory is not None:
        yield from conflicting_flags(config, UNSERVED, "checkpoint.directory")


@rule(
    name="checkpoint-space",
    reason="A drive that has no room for the checkpoints is told before step 1, not at a save.",
    machine=True,
)
def space(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a filesystem with less room than the checkpoints that stand at once take, state beside them."""
    key, planned = "checkpoint.directory", facts.planned
    known, one = facts.folders.get(key), planned.checkpoint_bytes
    if known is None or one is None or known.free_bytes is None or not config.checkpoint.optimizer:
        return
    if not known.is_network:
        one = math.ceil(one / config.launcher.nodes)
    state = sum(
        nbytes
        for directory, nbytes in zip(facts.directories, planned.directory_bytes, strict=False)
        if directory.device == known.device
    )
    coming = planned.checkpoints
    room, more = max(0, known.free_bytes + coming.freed - state), coming.more(config.checkpoint.keep)
    if known.kind not in PSEUDO_KINDS and room < one * more:
        stand = "one checkpoint takes" if more == 1 else f"{more} checkpoints that stand at once take"
        beside = f" and needs {format_bytes(state)} of it for state" if state else ""
        left = f", {format_bytes(coming.freed)} more once the next save begins" if coming.freed else ""
        keep = coming.keep_within(room // one)
        yield Problem(
            what=f"{stand} {format_bytes(one * more)}, and {key}={known.path} is on {known.mount_point} "
            f"({known.kind}), which has {format_bytes(known.free_bytes)} free{beside}{left}.",
            fix=f"checkpoint.keep={keep}" if keep else FOLDERS[key],
            keys=(key,),
            exit_code=3,
        )
