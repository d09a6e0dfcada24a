"""``muon-offload train recipe=... --rehearse``: the recipe, small, on CPU ranks of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from json import dumps
from pathlib import Path

import typer

from muon_offload_cli.checkpoints.names import step_folder
from muon_offload_cli.cli.train import asked_with, evidence_of, script_text
from muon_offload_cli.config.changes import changes
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.gathering import CACHE, gather_facts, resolve_directory
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.overrides import split_recipe
from muon_offload_cli.config.probing import needs_probe
from muon_offload_cli.config.rehearsal import Rehearsal, rehearse
from muon_offload_cli.config.rules import check, refuses
from muon_offload_cli.config.rules.directory import KEY as DIRECTORY
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.launch.figures import StepSeen
from muon_offload_cli.launch.folder import begin_folder, local_ranks
from muon_offload_cli.launch.follow import Event, RankReported
from muon_offload_cli.launch.job import Outcome, run_job
from muon_offload_cli.launch.legs import (
    KILL_AT,
    SAVE_EVERY,
    differences,
    killed_leg,
    resumed_leg,
    shortfalls,
    straight_leg,
)
from muon_offload_cli.launch.post_mortem import explain
from muon_offload_cli.launch.scratch import Scratch, remove_left_over, scratch_folder
from muon_offload_cli.launch.verdict import TRAINING_FAILED
from muon_offload_cli.machine import memory
from muon_offload_cli.tokens.verification import look_at_data, shortest_sequence, write_tokens

# What a host-memory budget of a real node becomes: some chunks stay in memory, as they would there.
HOST_MEMORY_GB = "0.001"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """What the legs have in common: their folder, the words of the command, and where to say what happens."""

    scratch: Scratch
    asked: Sequence[str]
    say: Callable[[str], None]


def rehearse_command(
    words: Sequence[str], *, recipe_directories: Sequence[Path] = (), json: bool = False
) -> int:
    """Shrink a recipe and run it straight, killed and resumed; returns the exit code.

    Args:
        words: ``recipe=NAME`` and overrides, as for a real run.
        recipe_directories: Folders of the user's own recipes.
        json: Print the findings as JSON on standard output, all else on standard error.

    Returns:
        0 if the resumed run ended with the same bits as the straight one; 4 otherwise; 128 + the signal's
        number if a person ended it.

    Raises:
        UserError: The recipe, or its small form on this machine, is refused.
    """
    small, written = _prepared(words, recipe_directories)
    directory = Path((small.config.offload.directory or [tempfile.gettempdir()])[0])
    _say(json, f"rehearsing {small.config.recipe} on {small.config.launcher.ranks_per_node} CPU ranks")
    for sentence in small.kept:
        _say(json, f"  kept    {sentence}")
    _say(json, f"  shrunk  {', '.join(map(str, small.changes))}")
    replaced = _replaced(small.config, written)
    if replaced:
        why = f"its legs save, resume and write in a folder of their own below {directory}"
        _say(json, f"  replaced {', '.join(replaced)}: {why}")
    for left in remove_left_over(directory):
        _say(json, f"  removed {left}, which a rehearsal that was killed had left")
    with scratch_folder(directory) as made:
        scratch = made.path
        try:
            found, code = _legs(
                small.config,
                _Setting(
                    scratch=made,
                    asked=asked_with(words, recipe_directories, "--rehearse"),
                    say=lambda text: _say(json, text),
                ),
            )
        except (UserError, KeyboardInterrupt):
            # The one says what to change, the other was meant; after any other error the logs here say why.
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        if not found:
            shutil.rmtree(scratch, ignore_errors=True)
    if code:
        _say(json, f"ended by {signal.Signals(code - 128).name}")
    for sentence in found:
        _say(json, f"error: {sentence}")
    if found:
        _say(json, f"kept for looking at: {scratch}")
    if not found and not code:
        _say(json, "the resumed run ended with the same weights, masters and momenta, bit for bit")
    if json:
        typer.echo(
            dumps(
                {
                    "recipe": small.config.recipe,
                    "fine": not found and not code,
                    "found": found,
                    "kept": list(small.kept),
                    "changes": [str(change) for change in small.changes],
                    "replaced": replaced,
                    "scratch": str(scratch) if found else None,
                }
            )
        )
    return code or (TRAINING_FAILED if found else 0)


def _replaced(config: Config, written: Set[str]) -> list[str]:
    """Return the keys that were written and that no leg reads."""
    leg = straight_leg(config, Path())
    return [
        change.key for change in changes(config, leg) if change.key in written and change.key != DIRECTORY
    ]


def _prepared(words: Sequence[str], recipe_directories: Sequence[Path]) -> tuple[Rehearsal, Set[str]]:
    """Compose, judge the real run by what does not depend on this machine, and the small one by all.

    Returns:
        The small run, and the keys that the user wrote.
    """
    recipe, overrides = split_recipe(words, find_recipes(recipe_directories))
    composition = compose(recipe, overrides, recipe_directories)
    real = composition.config
    facts = gather_facts(real, probe=needs_probe(real, here=False), data_problems=look_at_data(real))
    _refuse(
        check(
            real, composition.written, facts, here=False, own=composition.own, from_file=composition.from_file
        )
    )
    small = rehearse(real, shortest=shortest_sequence(real))
    if small.config.offload.host_memory_gib != 0:
        small.config.offload.host_memory_gb = HOST_MEMORY_GB
    resolve_directory(small.config)
    # No leg writes into the others.
    facts = gather_facts(small.config, probe=False, folders=(CACHE,))
    problems = check(small.config, frozenset(), facts)
    _refuse(problems)
    write_tokens(small.config)
    return small, composition.written


def _refuse(problems: list[Problem]) -> None:
    refused = refuses(problems)
    if refused:
        raise UserError(problems=refused)


def _legs(config: Config, setting: _Setting) -> tuple[list[str], int]:
    """Run the three legs; returns what is wrong, and the exit code if a person ended it."""
    scratch = setting.scratch.path
    straight = _run(straight_leg(config, scratch), setting, "straight")
    if straight.interrupted_by is not None:
        return [], 128 + straight.interrupted_by
    found = shortfalls(config, straight.reports, steps=config.train.steps)
    if found or config.train.steps <= KILL_AT:
        return found, 0
    killed = _run(killed_leg(config, scratch), setting, "killed", kill_at=KILL_AT)
    if killed.interrupted_by is not None:
        return [], 128 + killed.interrupted_by
    if not step_folder(scratch / "checkpoints", SAVE_EVERY).is_dir():
        return ["the killed run had saved nothing"], 0
    resumed = _run(resumed_leg(config, scratch), setting, "resumed")
    if resumed.interrupted_by is not None:
        return [], 128 + resumed.interrupted_by
    left = config.train.steps - SAVE_EVERY
    found = shortfalls(config, resumed.reports, steps=left)
    return found or differences(straight.reports, resumed.reports), 0


def _run(leg: Config, setting: _Setting, name: str, *, kill_at: int | None = None) -> Outcome:
    """Run one leg to its end; at step `kill_at` every rank is killed as a machine that dies would do it."""
    base, asked, say = Path.cwd(), setting.asked, setting.say
    folder = begin_folder(
        leg, now=datetime.now(), base=base, script=lambda folder: script_text(leg, folder, base, asked)
    )
    pids: dict[int, int] = {}
    seen: list[StepSeen] = []
    kills_before = memory.oom_kills()

    def on_event(event: Event) -> None:
        if isinstance(event, RankReported):
            pids[event.report.rank] = event.report.pid
            return
        if not isinstance(event, StepSeen):
            say(f"  {event}")
            return
        seen.append(event)
        if kill_at is not None and event.step == kill_at:
            # 0, of a report without a number, would be this process and its whole group.
            for pid in filter(None, pids.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    outcome = run_job(
        ["bash", str(folder.script)], folder, local_ranks(leg), on_event, held=setting.scratch.held
    )
    losses = ", ".join(f"{step.loss:.4f}" for step in seen if step.loss is not None)
    say(f"  {name:<8}  {len(seen)} steps in {outcome.seconds:.0f} s, losses {losses or 'none'}")
    if outcome.exit_code != 0 and kill_at is None and outcome.interrupted_by is None:
        death = explain(evidence_of(leg, folder, outcome, kills_before))
        if death.problems:
            raise UserError(problems=death.problems)
        say(f"  {death.what} {death.cause}".rstrip())
        for line in death.last_lines:
            say(f"  | {line}")
    return outcome


def _say(json: bool, text: str) -> None:
    typer.echo(text, err=json)
