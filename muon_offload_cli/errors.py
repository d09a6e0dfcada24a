"""Errors that a person can cause, and how they are told.

A user error is one or more `Problem`s: what is wrong, with the key and its value, and a fix that can
be pasted. Nothing here formats for a terminal; `cli` is the only error boundary and decides that.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# What neither a shell nor the grammar of overrides takes for anything else.
_PLAIN = re.compile(r"[\w/.:@%+-]*", re.ASCII)


class Level(enum.StrEnum):
    """How much a problem matters: errors refuse the run, warnings do so only under ``--strict``."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: One sentence that names the key (or path), its value and the reason.
        fix: Text that can be pasted (``key=value``) where one exists, else one sentence; may be empty.
        keys: Config keys concerned, in dotted form.
        level: Error, warning or note.
        rule: Name of the rule that found it, empty outside the gates.
        exit_code: What the command exits with if this is the worst problem: 2 the request is wrong,
            3 it does not fit this machine.
    """

    what: str
    fix: str = ""
    keys: tuple[str, ...] = ()
    level: Level = Level.ERROR
    rule: str = ""
    exit_code: int = 2


@dataclass(kw_only=True)
class UserError(Exception):
    """What a person asked for cannot be done; carries every problem that was found."""

    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(" ".join(problem.what for problem in self.problems))

    @property
    def exit_code(self) -> int:
        """The largest exit code among the problems (3, does not fit, wins over 2, wrong request)."""
        return max((problem.exit_code for problem in self.problems), default=2)


def wrong(what: str, fix: str = "", *keys: str) -> UserError:
    """Return a `UserError` with one problem of exit code 2 (the request is wrong)."""
    return UserError(problems=[Problem(what=what, fix=fix, keys=keys)])


def does_not_fit(what: str, fix: str = "", *keys: str) -> UserError:
    """Return a `UserError` with one problem of exit code 3 (it does not fit this machine)."""
    return UserError(problems=[Problem(what=what, fix=fix, keys=keys, exit_code=3)])


def override(key: str, value: str | Path | Sequence[str]) -> str:
    """Write ``key=value`` so that it can be pasted into a shell, whatever the text holds.

    Args:
        key: A key of the configuration.
        value: A text, or several for a list.
    """
    listed = not isinstance(value, str | Path)
    texts = list(value) if not isinstance(value, str | Path) else [str(value)]
    # The grammar has quotes of its own, inside the shell's; within them it takes any character.
    joined = ",".join(text if _PLAIN.fullmatch(text) else _in_quotes(text) for text in texts)
    word = f"{key}=[{joined}]" if listed else f"{key}={joined}"
    return word if all(map(_PLAIN.fullmatch, texts)) else shell_word(word)


def command(*words: str | Path) -> str:
    """Write a shell command so that it can be pasted, whatever its words hold."""
    return " ".join(shell_word(str(word)) for word in words)


def shell_word(text: str) -> str:
    """Quote a text so that bash takes it as it is; in printable ASCII if it holds what is not printable.

    A path may hold bytes that are no text, which Python keeps as lone surrogates (PEP 383) and no terminal
    prints.
    """
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_in_ansi_quotes, text)) + "'"


def visible(text: str) -> str:
    """Write control characters, and bytes that are no text, as their escapes: what is left is one line."""
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return f"\\x{ord(char) - 0xDC00:02x}" if "\udc80" <= char <= "\udcff" else repr(char)[1:-1]


def _in_ansi_quotes(char: str) -> str:
    if char.isascii() and char.isprintable():
        return "\\" + char if char in "'\\" else char
    escaped = "surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", escaped))


def _in_quotes(text: str) -> str:
    """Quote a text for the grammar of overrides: backslashes count as such before a quote alone."""
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + '\\"' * bool(found[2]), text)
    return f'"{escaped}"'
