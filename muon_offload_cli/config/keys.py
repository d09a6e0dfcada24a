"""The keys that exist, their types, and the nearest name for one that does not.

Read from the schema's dataclasses, so that a new field is known here without a second list.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import types
import typing
from collections.abc import Iterable
from typing import Any

from muon_offload_cli.config.schema import Config

FREE_PREFIX = "megatron.args."
ONE_OR_SEVERAL = frozenset({"offload.directory"})
"""Keys that hold a list and take a text for a list of one."""


@functools.cache
def leaf_types() -> dict[str, Any]:
    """Return the type of every key that holds a value, by dotted name, in the schema's order.

    ``megatron.args`` is not among them: its flags are keys of their own, and no list names them all.
    """
    found: dict[str, Any] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            name = prefix + field.name
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                walk(hint, name + ".")
            elif typing.get_origin(hint) is not dict:
                found[name] = hint

    walk(Config, "")
    return found


@functools.cache
def section_names() -> frozenset[str]:
    """Return every key that holds further keys: ``optimizer``, ``model.moe``, ``megatron.args``, ..."""
    sections = {FREE_PREFIX.rstrip(".")}
    for name in leaf_types():
        parts = name.split(".")
        sections.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return frozenset(sections)


def is_known(key: str) -> bool:
    """Tell whether `key` holds a value in the schema or names a Megatron flag."""
    return key in leaf_types() or (key.startswith(FREE_PREFIX) and len(key) > len(FREE_PREFIX))


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` candidates that look like `name`, nearest first; never any far ones.

    Names longer than 200 characters have no neighbours; comparing them would only take time.
    """
    if len(name) > 200:
        return []
    return difflib.get_close_matches(name, list(candidates), n=count, cutoff=0.6)


def nearest_key(key: str) -> str | None:
    """Return the key that was probably meant: a near name, or the same last part in another section."""
    known = list(leaf_types())
    last = key.rpartition(".")[2]
    same_last = [name for name in known if name.rpartition(".")[2] == last]
    close = nearest(key, known, count=1)
    if close and (len(same_last) != 1 or close[0].rpartition(".")[2] == last or "." in key):
        return close[0]
    if same_last:
        return (nearest(key, same_last, count=1) or same_last)[0]
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    close_last = nearest(last, by_last, count=1)
    return by_last[close_last[0]] if close_last else None


def misspelt_section(key: str) -> tuple[str, str] | None:
    """Return the part of a key that names no section, and the section that is meant; None otherwise."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        section, holder = ".".join(parts[:depth]), ".".join(parts[: depth - 1])
        if section in section_names():
            continue
        beside = {name.rpartition(".")[2] for name in section_names() if name.rpartition(".")[0] == holder}
        near = [] if section in leaf_types() else nearest(parts[depth - 1], beside, count=1)
        return (section, ".".join([*parts[: depth - 1], *near])) if near else None
    return None


def describe_type(key: str) -> str:
    """Say in words what `key` takes: ``a whole number``, ``true or false``, ``one of cpu, cuda``."""
    hint = leaf_types().get(key, Any)
    arguments = typing.get_args(hint)
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in arguments
    if optional:
        hint = next(argument for argument in arguments if argument is not type(None))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        words = "one of " + ", ".join(hint.__members__)
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
            hint, "a list, [a,b]" if typing.get_origin(hint) is list else "a mapping, {a: 1}"
        )
    if key in ONE_OR_SEVERAL:
        words = f"a text, or {words}"
    return f"{words}, or null" if optional else words


def enum_members(key: str) -> list[str]:
    """Return the names that an enumerated key takes, an empty list for any other key."""
    hint = leaf_types().get(key)
    return list(hint.__members__) if isinstance(hint, type) and issubclass(hint, enum.Enum) else []


def is_text(key: str) -> bool:
    """Tell whether `key` holds a text (or a list of them), so that any characters may be meant."""
    hint = leaf_types().get(key)
    return hint in (str, list[str], str | None, list[str] | None)


def takes_null(key: str) -> bool:
    """Tell whether `key` may hold nothing."""
    return type(None) in typing.get_args(leaf_types().get(key))


def example_of(key: str) -> str:
    """Return a value that `key` takes, as the command line writes it; ``...`` where no text fits them all."""
    chosen = {
        "train.steps": "30",
        "train.sequence_length": "2048",
        "train.global_batch": "8",
        "model.from_hf": "/path/of/the/model",
        "data.paths": "[/path/to/file]",
    }
    if key in chosen or takes_null(key):
        return chosen.get(key, "null")
    hint = leaf_types().get(key, Any)
    if typing.get_origin(hint) is list:
        return "[a,b]"
    return next(iter(enum_members(key)), {int: "1", float: "1.0", bool: "true"}.get(hint, "..."))
