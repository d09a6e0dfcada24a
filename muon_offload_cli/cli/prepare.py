"""From the words of a command line to a configuration that was judged, and to one that may start."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from muon_offload_cli.cli.planning import layouts_here, plan_for_rules, settle_host_memory
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.gathering import gather_facts, resolve_directory
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.overrides import split_recipe
from muon_offload_cli.config.probing import needs_probe
from muon_offload_cli.config.rules import check, refuses
from muon_offload_cli.config.rules.machine import wants_more_gpus
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import Level, Problem, UserError
from muon_offload_cli.machine.devices import gpu_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A run as the rules see it.

    Attributes:
        config: Composed; `offload.host_memory_gb` is a number, and `device` settled if the run is to start.
        problems: All that was found, notes of what ``auto`` took included.
        here: Whether this machine was judged, and not the recipe's cluster.
    """

    config: Config
    problems: list[Problem]
    here: bool

    def refuse(self) -> None:
        """Raise `UserError` with every problem that forbids the run, if any does."""
        refused = refuses(self.problems)
        if refused:
            raise UserError(problems=refused)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that may start.

    Attributes:
        config: Resolved: `device` and `offload.host_memory_gb` are no longer ``auto``, `offload.directory` is
            set if it is read.
        remarks: Warnings and notes of the rules.
    """

    config: Config
    remarks: list[Problem]


def judge(
    words: Sequence[str],
    recipe_directories: Sequence[Path],
    *,
    here: bool,
    start: bool = False,
    room: bool = True,
    ask: bool = True,
) -> Judged:
    """Compose and run every rule: the one way in which commands judge a run.

    Args:
        words: Recipe and overrides.
        recipe_directories: Folders of the user's own recipes.
        here: Judge this machine whatever cluster the recipe names, with a real write in its directory.
        start: The run is about to start: settle its device, and ask Megatron whether a rule needs it or not.
        room: Judge room on the drive; False for a command that does so itself.
        ask: Ask Megatron, which takes seconds, for another machine's run too where a rule needs it.
    """
    recipe, overrides = split_recipe(words, find_recipes(recipe_directories))
    composition = compose(recipe, overrides, recipe_directories)
    config = composition.config
    local = here or config.cluster.name == "local"
    remarks = settle_host_memory(config, here=local)
    if start and config.device is Device.auto:
        remarks += _choose_device(config, composition.written, gpu_count())
    planned = plan_for_rules(config, composition.written)
    facts = gather_facts(
        config,
        probe=start or (needs_probe(config, here=local) and (ask or local)),
        write=here and room,
        planned=planned if room else replace(planned, needed_bytes=None),
    )
    if local and wants_more_gpus(config, facts):
        told, fix = layouts_here(
            config,
            composition.written,
            gpus=facts.num_gpus or 1,
            disk_bytes=facts.directory.free_bytes if facts.directory is not None else None,
        )
        facts = replace(facts, layouts_told=told, layouts_fix=fix)
    problems = check(config, composition.written, facts, here=local)
    return Judged(config=config, problems=[*problems, *remarks], here=local)


def prepare(words: Sequence[str], recipe_directories: Sequence[Path]) -> Prepared:
    """Judge a run that is about to start here, and settle what depends on this machine.

    Raises:
        UserError: With every problem, if any forbids the run.
    """
    judged = judge(words, recipe_directories, here=True, start=True)
    judged.refuse()
    return Prepared(config=resolve_directory(judged.config), remarks=judged.problems)


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
