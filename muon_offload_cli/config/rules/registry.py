"""What a rule is: a named, reasoned, pure function over the config, what was written, and facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Level, Problem

Check = Callable[[Config, Set[str], MachineFacts], Iterable[Problem]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A gate.

    Attributes:
        name: Short name in words joined by dashes, unique among all rules.
        reason: Why the rule exists, one sentence for the documentation.
        machine: It judges the machine at hand rather than the request.
        check: The pure function; yields problems whose `rule` is filled in by `__call__`.
    """

    name: str
    reason: str
    machine: bool
    check: Check

    @property
    def summary(self) -> str:
        """First line of the function's docstring: what the rule does."""
        return (self.check.__doc__ or "").strip().partition("\n")[0]

    def __call__(self, config: Config, written: Set[str], facts: MachineFacts) -> list[Problem]:
        """Return what the rule finds, each problem with the rule's name."""
        return [replace(problem, rule=self.name) for problem in self.check(config, written, facts)]


def rule(*, name: str, reason: str, machine: bool = False) -> Callable[[Check], Rule]:
    """Turn a function into a `Rule`.

    Args:
        name: See `Rule`.
        reason: See `Rule`.
        machine: See `Rule`; such findings are only notes where the config is meant for elsewhere.
    """

    def decorate(check: Check) -> Rule:
        return Rule(name=name, reason=reason, machine=machine, check=check)

    return decorate


def as_note(problem: Problem) -> Problem:
    """Return the problem as a note: said, but not counted."""
    return replace(problem, level=Level.NOTE)
