"""What differs between two runs, key by key, as the command line takes it. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from muon_offload_cli.config.keys import leaf_types
from muon_offload_cli.config.rules.settings import value_of
from muon_offload_cli.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One key with two values."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key} {spelled(self.before)} -> {spelled(self.after)}"

    @property
    def override(self) -> str:
        """The word that makes the change."""
        return f"{self.key}={spelled(self.after)}"


def changes(before: Config, after: Config) -> tuple[Change, ...]:
    """Return the keys whose values differ, in the schema's order."""
    return tuple(
        Change(key=key, before=old, after=new)
        for key in leaf_types()
        if (old := value_of(before, key)) != (new := value_of(after, key))
    )


def spelled(value: object) -> str:
    """Write a value as the command line takes it."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
