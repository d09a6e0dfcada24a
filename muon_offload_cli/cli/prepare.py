"""From the words of a command line to a configuration that was judged, and to one that may start."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from muon_offload_cli.cli.planning import layouts_here, plan_for_rules, settle_host_memory
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.gathering import CACHE, gather_facts, resolve_directory
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.overrides import split_recipe
from muon_offload_cli.config.probing import needs_probe
from muon_offload_cli.config.rules import MachineFacts, check, refuses
from muon_offload_cli.config.rules.directory import FOLDERS
from muon_offload_cli.config.rules.machine import wants_more_gpus
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import Level, Problem, UserError
from muon_offload_cli.launch.folder import demand_own
from muon_offload_cli.launch.resume import settle_checkpoints
from muon_offload_cli.machine.devices import gpu_count
from muon_offload_cli.tokens.verification import look_at_data

RUN = "run.directory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A run as the rules see it.

    Attributes:
        config: Composed; `offload.host_memory_gb` is a number; if this machine was judged, the checkpoint to
            go on from is chosen, and `device` settled.
        asked: As `config`, before a checkpoint was chosen.
        problems: All that was found, notes of what ``auto`` took included.
        chosen: Notes on the checkpoint that was chosen, which are among these.
        here: Whether this machine was judged, and not the recipe's cluster.
        facts: What was known of the machine.
    """

    config: Config
    asked: Config
    problems: list[Problem]
    chosen: list[Problem]
    here: bool
    facts: MachineFacts

    def refuse(self) -> None:
        """Raise `UserError` with every problem that forbids the run, if any does."""
        refused = refuses(self.problems)
        if refused:
            raise UserError(problems=refused)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run that may start.

    Attributes:
        config: Resolved: `device`, `offload.host_memory_gb` and `resume` are no longer ``auto``,
            `offload.directory` is set if it is read.
        asked: As `config`, before a checkpoint was chosen.
        remarks: Warnings and notes of the rules.
        chosen: Notes on the checkpoint that was chosen.
        facts: What is known of the machine.
    """

    config: Config
    asked: Config
    remarks: list[Problem]
    chosen: list[Problem]
    facts: MachineFacts


def judge(
    words: Sequence[str],
    recipe_directories: Sequence[Path],
    *,
    here: bool,
    start: bool = False,
    room: bool = True,
) -> Judged:
    """Compose and run every rule: the one way in which commands judge a run.

    Args:
        words: Recipe and overrides.
        recipe_directories: Folders of the user's own recipes.
        here: Judge this machine whatever cluster the recipe names, with a real write in its directory.
        start: The run is about to start: ask Megatron whether a rule needs it or not.
        room: Judge room on the drive; False for a command that does so itself.
    """
    recipe, overrides = split_recipe(words, find_recipes(recipe_directories))
    composition = compose(recipe, overrides, recipe_directories)
    config = composition.config
    local = here or config.cluster.name == "local"
    remarks = list[Problem]()
    if local and config.device is Device.auto:
        remarks += _choose_device(config, composition.written, gpu_count())
    remarks += settle_host_memory(config, composition.written, here=local)
    planned = plan_for_rules(config, composition.written)
    facts = gather_facts(
        config,
        probe=start or needs_probe(config, here=local),
        write=here and room,
        planned=planned if room else replace(planned, directory_bytes=(), checkpoint_bytes=None),
        # Nothing is started without room, so no folder of a run and no tokens are written.
        folders=[key for key in FOLDERS if room or key not in (RUN, CACHE)],
        data_problems=look_at_data(config),
    )
    if local and wants_more_gpus(config, facts):
        told, fix = layouts_here(
            config,
            composition.written,
            gpus=facts.num_gpus or 1,
            disk_bytes=_room_on_drives(facts),
        )
        facts = replace(facts, layouts_told=told, layouts_fix=fix)
    problems = check(
        config, composition.written, facts, here=local, own=composition.own, from_file=composition.from_file
    )
    if local and room and not any(RUN in each.keys for each in refuses(problems)):
        try:
            demand_own(config, base=Path.cwd())
        except UserError as error:
            problems += error.problems
    asked, chosen = config, list[Problem]()
    if local and not _resumes_wrongly(problems):
        try:
            config, chosen = settle_checkpoints(config, Path.cwd())
            if config.resume.step is not None:
                # Weights come from the checkpoint then (megatron/hf_weights.py), and not from a folder.
                problems = [each for each in problems if each.rule != "hf-weights"]
        except UserError as error:
            problems += error.problems
    return Judged(
        config=config,
        asked=asked,
        problems=[*problems, *chosen, *remarks],
        chosen=chosen,
        here=local,
        facts=facts,
    )


def _room_on_drives(facts: MachineFacts) -> int | None:
    """Return the bytes that the offload directories take when each drive gets the same; None: not known."""
    free = {each.device: each.free_bytes for each in facts.directories if each.free_bytes is not None}
    return min(free.values()) * len(free) if free else None


def _resumes_wrongly(problems: Sequence[Problem]) -> bool:
    """Tell whether a rule refuses what to go on from, or where to save: there is then nothing to look at."""
    return any(
        key.startswith("resume.") or (key == "checkpoint.directory" and each.rule.startswith("directory-"))
        for each in refuses(problems)
        for key in each.keys
    )


def prepare(words: Sequence[str], recipe_directories: Sequence[Path]) -> PreparedRun:
    """Judge a run that is about to start here, and settle what depends on this machine.

    Raises:
        UserError: With every problem, if any forbids the run.
    """
    judged = judge(words, recipe_directories, here=True, start=True)
    judged.refuse()
    return PreparedRun(
        config=resolve_directory(judged.config),
        asked=resolve_directory(judged.asked),
        remarks=[problem for problem in judged.problems if problem not in judged.chosen],
        chosen=judged.chosen,
        facts=judged.facts,
    )


def _choose_device(config: Config, written: Set[str], num_gpus: int) -> list[Problem]:
    """Replace ``auto``; says so if GPUs are there and not used."""
    ranks = config.launcher.ranks_per_node
    config.device = Device.cuda if num_gpus >= ranks else Device.cpu
    if 0 < num_gpus < ranks:
        told, fix = layouts_here(config, written, gpus=num_gpus)
        what = (
            f"device=auto trains on the CPU: launcher.ranks_per_node={ranks} needs {ranks} GPUs, and this "
            f"machine has {num_gpus}. {told}"
        )
        return [
            Problem(
                what=what.rstrip(),
                fix=f"device=cuda {fix}" if fix else "a machine with more GPUs",
                keys=("device", "launcher.ranks_per_node"),
                level=Level.NOTE,
            )
        ]
    return []
