"""From the words of a command line to a configuration that may start: composed, judged, settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.cli.planning import plan_for_rules, settle_host_memory
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.gathering import gather_facts, resolve_directory
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.overrides import split_recipe
from muon_offload_cli.config.rules import check, refuses
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import Level, Problem, UserError
from muon_offload_cli.machine.devices import gpu_count


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


def prepare(words: Sequence[str], recipe_directories: Sequence[Path]) -> Prepared:
    """Compose, run every rule, and settle what depends on this machine.

    Raises:
        UserError: With every problem, if any forbids the run.
    """
    recipe, overrides = split_recipe(words, find_recipes(recipe_directories))
    composition = compose(recipe, overrides, recipe_directories)
    config = composition.config
    remarks = []
    if config.device is Device.auto:
        remarks = _choose_device(config, gpu_count())
    remarks += settle_host_memory(config, here=True)
    planned = plan_for_rules(config, composition.written)
    facts = gather_facts(config, probe=True, write=True, planned=planned)
    problems = check(config, composition.written, facts)
    refused = refuses(problems)
    if refused:
        raise UserError(problems=refused)
    return Prepared(config=resolve_directory(config), remarks=[*remarks, *problems])


def _choose_device(config: Config, num_gpus: int) -> list[Problem]:
    """Replace ``auto``; says so if GPUs are there and not used."""
    ranks = config.launcher.ranks_per_node
    config.device = Device.cuda if num_gpus >= ranks else Device.cpu
    if 0 < num_gpus < ranks:
        return [
            Problem(
                what=f"device=auto trains on the CPU: launcher.ranks_per_node={ranks} "
                f"needs {ranks} GPUs, and this machine has {num_gpus}.",
                fix=f"launcher.ranks_per_node={num_gpus} device=cuda, with parallel sizes that divide it",
                keys=("device", "launcher.ranks_per_node"),
                level=Level.NOTE,
            )
        ]
    return []
