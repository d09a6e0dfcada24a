"""Replacing attributes of modules that are not ours, for a while."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Substitutions(ExitStack):
    """A stack of attribute replacements that are undone in reverse order on exit."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name = value`` until the stack is closed.

        Args:
            owner: Module, class or object.
            name: Attribute; one that `owner` lacks is removed again on exit.
            value: What stands there meanwhile.
        """
        own = vars(owner)
        if name in own:
            self.callback(setattr, owner, name, own[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)
