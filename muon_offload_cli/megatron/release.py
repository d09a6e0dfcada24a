"""Which Megatron this is: the release, for people to read, and the flags that it takes."""

from __future__ import annotations

import argparse
from typing import Any


def megatron_release() -> str:
    """Return the version that Megatron calls itself by, ``0.19.2``.

    Without the hash that Megatron appends: it asks git in the folder that it lies in, and in a virtual
    environment inside a checkout of some other project that is the other project's commit.

    Raises:
        ImportError: There is no megatron-core.
    """
    from megatron.core import package_info

    return str(package_info.__version__).partition("+")[0]


def parser_flags() -> frozenset[str]:
    """Return the option strings of Megatron's own parser.

    Raises:
        ImportError: This Megatron comes without its training loop.
    """
    return frozenset(flag_values())


def flag_values() -> dict[str, dict[str, Any]]:
    """Return what Megatron's own parser takes after each of its option strings, as `FlagFacts` has it.

    Raises:
        ImportError: This Megatron comes without its training loop.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {option: _takes(action) for action in parser._actions for option in action.option_strings}


def _takes(action: argparse.Action) -> dict[str, Any]:
    choices = list(action.choices or ())
    kind = getattr(action.type, "__name__", "")
    return {
        "nargs": action.nargs,
        "kind": kind,
        # Others come out of a type of Megatron's own.
        "choices": choices if all(type(choice).__name__ == (kind or "str") for choice in choices) else [],
    }
