"""From the words of a command line to a configuration that may start: composed, judged, settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.gathering import gather_facts, needs_probe, resolve_directory
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.overrides import split_recipe
from muon_offload_cli.config.rules import check, refuses
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.machine.devices import gpu_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that may start.

    Attributes:
        config: Resolved: `device` is no longer ``auto``, `offload.directory` is set if it is read.
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
    if config.device is Device.auto:
        config.device = Device.cuda if gpu_count() else Device.cpu
    facts = gather_facts(config, probe=needs_probe(config))
    problems = check(config, composition.written, facts)
    refused = refuses(problems)
    if refused:
        raise UserError(problems=refused)
    return Prepared(config=resolve_directory(config), remarks=problems)
