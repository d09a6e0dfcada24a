"""Reading settings that may be keys of ours or flags of Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from muon_offload_cli.config.keys import FREE_PREFIX, leaf_types
from muon_offload_cli.config.rules.facts import FileFacts
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem, command

# Megatron and torch keep sizes, seeds and counts in 64-bit integers, and some in 32.
LARGEST = 2**31 - 1


def value_of(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def is_on(value: Any) -> bool:
    """Tell whether a Megatron flag is given at all: false and null leave it out."""
    return value is not None and value is not False


def flag_value(config: Config, flag: str) -> Any:
    """Return the value of a flag in `megatron.args`, written with dashes or underscores; None: not given."""
    for name, value in config.megatron.args.items():
        if name.replace("-", "_") == flag and is_on(value):
            return value
    return None


def has_flag(config: Config, flag: str) -> bool:
    """Tell whether `megatron.args` turns a flag on."""
    return flag_value(config, flag) is not None


def conflicting_flags(config: Config, reasons: Mapping[str, str], key: str) -> Iterator[Problem]:
    """Yield each flag in `megatron.args` that does not go with the value that a key of ours has.

    Args:
        config: The run.
        reasons: The flags, and why not.
        key: That key.
    """
    value = value_of(config, key)
    for flag, reason in reasons.items():
        if has_flag(config, flag):
            name = FREE_PREFIX + flag
            yield Problem(
                what=f"{name} with {key}={getattr(value, 'name', value)}: {reason}.",
                fix=f"{name}=false",
                keys=(name, key),
            )


def setting(config: Config, flag: str) -> tuple[str, Any]:
    """Return the key and the value of a setting of Megatron, whichever of the two ways gives it.

    Args:
        config: The run.
        flag: Name of the flag, which is the last part of the key of ours.
    """
    for section in ("parallel", "model"):
        key = f"{section}.{flag}"
        if key in leaf_types():
            own = value_of(config, key)
            if own is not None and own is not False:
                return key, own
    return FREE_PREFIX + flag, flag_value(config, flag)


def count_of(value: Any) -> int | None:
    """Return the whole number that a flag's value stands for, None if it is none."""
    if isinstance(value, bool):
        return None
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if abs(number) <= LARGEST else None


def in_range(value: float, low: float, high: float = LARGEST) -> bool:
    """Tell whether a number lies between two others; never true for NaN or an infinity."""
    return low <= value <= high and (isinstance(value, int) or math.isfinite(value))


def file_problems(key: str, path: str, found: FileFacts, *, otherwise: str) -> Iterator[Problem]:
    """Yield why a file that the run reads cannot be read, if it cannot.

    Args:
        key: The key that names it.
        path: The file, as given.
        found: What lies there.
        otherwise: What to do without such a file, as the end of a sentence.
    """
    if found.is_folder:
        what, fix = f"{path} is a folder, not a file", f"name what is in it: {key}=..."
    elif found.num_bytes is None:
        what, fix = f"there is no file {path}", f"correct {key}, or {otherwise}"
    elif not found.readable:
        what, fix = f"{path} cannot be read by this user", command("chmod", "u+r", path)
    elif found.num_bytes == 0:
        what, fix = f"{path} is empty", f"name another file in {key}, or {otherwise}"
    else:
        return
    yield Problem(what=f"{key}: {what}.", fix=fix, keys=(key,))
