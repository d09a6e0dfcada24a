"""The gates: every combination that cannot work is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType
from typing import Any

from muon_offload_cli.config.rules import (
    architecture,
    checkpoint,
    chunks,
    data,
    directories,
    directory,
    entry_point,
    exclusive,
    family,
    flags,
    limits,
    machine,
    model,
    numbers,
    pipeline,
    pretrained,
    topology,
    unread,
)
from muon_offload_cli.config.rules.facts import (
    DirectoryFacts,
    FileFacts,
    MachineFacts,
    MegatronFacts,
    ParameterFacts,
    PlannedFacts,
    PretrainedFacts,
)
from muon_offload_cli.config.rules.registry import Rule, as_note
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Level, Problem

__all__ = [
    "DirectoryFacts",
    "FileFacts",
    "MachineFacts",
    "MegatronFacts",
    "ParameterFacts",
    "PlannedFacts",
    "PretrainedFacts",
    "Rule",
    "all_rules",
    "check",
    "refuses",
    "rules_by_subject",
]

_SUBJECTS = (
    family,
    numbers,
    chunks,
    exclusive,
    checkpoint,
    flags,
    entry_point,
    unread,
    topology,
    pipeline,
    model,
    architecture,
    pretrained,
    data,
    machine,
    limits,
    directory,
    directories,
)

NOTHING: Mapping[str, Any] = MappingProxyType({})


def all_rules() -> list[Rule]:
    """Return every rule, by subject, in the order in which problems are told."""
    return [rule for found in rules_by_subject().values() for rule in found]


def rules_by_subject() -> dict[str, list[Rule]]:
    """Return every rule by the first line of its module's docstring."""
    return {
        (subject.__doc__ or "").partition("\n")[0]: [
            value for value in vars(subject).values() if isinstance(value, Rule)
        ]
        for subject in _SUBJECTS
    }


def check(
    config: Config,
    written: Set[str],
    facts: MachineFacts,
    *,
    here: bool = True,
    own: Mapping[str, Any] = NOTHING,
    from_file: Mapping[str, str] = NOTHING,
) -> list[Problem]:
    """Run every rule.

    Args:
        config: The composed run.
        written: Keys that the user wrote, from `Composition.written`.
        facts: What is known of the machine at hand.
        here: The run is meant for this machine; else what only the machine can tell is a note.
        own: What the recipe has where the command line says otherwise, from `Composition.own`.
        from_file: Keys that a Hugging Face model decides, from `Composition.from_file`.

    Returns:
        Everything that was found, errors before warnings before notes.
    """
    found: list[Problem] = []
    for rule in all_rules():
        problems = rule(config, written, facts)
        found += problems if here or not rule.machine else map(as_note, problems)
    found = [pretrained.in_its_file(numbers.with_own_number(problem, own), from_file) for problem in found]
    order = list(Level)
    return sorted(found, key=lambda problem: order.index(problem.level))


def refuses(problems: Iterable[Problem], *, strict: bool = False) -> list[Problem]:
    """Return the problems that forbid the run: errors, and warnings too if `strict`."""
    levels = {Level.ERROR, Level.WARNING} if strict else {Level.ERROR}
    return [problem for problem in problems if problem.level in levels]
