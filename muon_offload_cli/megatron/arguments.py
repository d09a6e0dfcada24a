"""The arguments of `muon_offload_cli.install`: checked, made settings, and told back in their units."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.machine.filesystem import inspect
from muon_offload_cli.machine.write_test import write_test
from muon_offload_cli.offload.directories import directories_of
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.storage.extent import ALIGNMENT
from muon_offload_cli.units import GIB, MIB

ENGINES = ("disk", "mapped", "host")

LARGEST = 2**40
"""Of MiB and GiB; more is a mistake, and would not fit the arithmetic in bytes."""

DRIVE_FOLDER = "/absolute/folder/on/a/local/drive"

# Fields of `OffloadSettings` that `install` takes by another name.
_IN_OTHER_UNITS = ("directories", "chunk_bytes", "host_bytes")


def make_settings(
    *,
    directory: str | Path | Sequence[str | Path] | None,
    engine: str,
    chunk_mb: float,
    fraction: float,
    host_memory_gb: float,
    ranks_per_node: int | None,
    windows: int,
) -> OffloadSettings:
    """Check arguments in the user's units and turn them into one rank's settings in bytes.

    Raises:
        UserError: All problems at once.
    """
    problems: list[Problem] = []

    def expect(holds: bool, name: str, value: object, wanted: str, fix: object) -> None:
        if not holds:
            what = f"install({name}={value!r}): want {wanted}."
            problems.append(Problem(what=what, fix=f"{name}={fix!r}", keys=(name,)))

    expect(engine in ENGINES, "engine", engine, " or ".join(ENGINES), "disk")
    directories = _paths(directory)
    fine = directories is not None and len(set(directories)) == len(directories)
    if directories and engine != "host":
        fine = fine and all(each.is_absolute() for each in directories)
    expect(
        fine and (bool(directories) or engine == "host"),
        "directory",
        directory,
        "an absolute folder on a node-local drive, or a list of such folders, each once",
        DRIVE_FOLDER,
    )
    if directories and fine and engine != "host":
        problems += filter(None, map(_why_not_on, directories))
    expect(_in_range(chunk_mb, 0, LARGEST), "chunk_mb", chunk_mb, "0 or more MiB", 512)
    # With none of it, everything would quietly stay on the device.
    some = _in_range(fraction, 0, 1) and fraction > 0
    expect(some, "fraction", fraction, "a number above 0, at most 1", 1.0)
    expect(_in_range(host_memory_gb, 0, LARGEST), "host_memory_gb", host_memory_gb, "0 or more GiB", 0)
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    sharing = int(local_ranks) if ranks_per_node is None and local_ranks.isdecimal() else ranks_per_node
    expect(_is_count(sharing), "ranks_per_node", ranks_per_node, "a whole number of 1 or more", 1)
    expect(_is_count(windows), "windows", windows, "a whole number of 1 or more", 3)
    if problems or sharing is None or directories is None:
        raise UserError(problems=problems)
    return OffloadSettings(
        engine=engine,
        directories=directories_of(directories, ranks=sharing, local_rank=local_rank()),
        # Rounded up: 0 bytes would mean one chunk of everything.
        chunk_bytes=math.ceil(chunk_mb * MIB),
        fraction=fraction,
        host_bytes=round(host_memory_gb * GIB) // sharing,
        windows=windows,
    )


def local_rank() -> int:
    """Return this process's number among the ranks of its node; 0 where torchrun does not say it."""
    given = os.environ.get("LOCAL_RANK", "")
    return int(given) if given.isdecimal() else 0


def differences(present: OffloadSettings, asked: OffloadSettings) -> str:
    """Say how two settings differ, in the names and units of `install`."""
    before, after = _as_given(present), _as_given(asked)
    told = [f"{name}={value}, and {before[name]} is in use" for name, value in after.items()]
    differing = [words for words, name in zip(told, after, strict=True) if before[name] != after[name]]
    return "; ".join(differing) or "another caller's"


def _as_given(settings: OffloadSettings) -> dict[str, str]:
    """Return settings by argument; directories and host memory are this rank's share."""
    given = {field.name: str(getattr(settings, field.name)) for field in fields(settings)}
    given["directory"] = ", ".join(map(str, settings.directories)) or "none"
    given["chunk_mb"] = f"{settings.chunk_bytes / MIB:.12g}"
    given["host_memory_gb"] = f"{settings.host_bytes / GIB:.12g} a rank"
    return {name: text for name, text in given.items() if name not in _IN_OTHER_UNITS}


def _paths(given: object) -> list[Path] | None:
    """Return the argument `directory` as a list; None if it is none of paths."""
    if given is None:
        return []
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    paths = [Path(each) for each in several if isinstance(each, str | Path)]
    return paths if len(paths) == len(several) else None


def _why_not_on(directory: Path) -> Problem | None:
    """Say what keeps an absolute folder, which need not exist, from holding state; nothing stays in it."""
    try:
        mount = inspect(directory)
        if not mount.existing.is_dir():
            reason = f"{mount.existing} is a file, not a folder"
        elif mount.is_memory:
            reason = f"it is on {mount.mount_point} ({mount.kind}): memory, not a disk"
        elif not mount.writable:
            reason = f"{mount.existing} is not writable by this user"
        else:
            error = write_test(mount.existing, ALIGNMENT)
            reason = f"it is on {mount.mount_point} ({mount.kind}): {error}" if error else ""
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = f"it cannot be looked at: {error}"
    if not reason:
        return None
    return Problem(
        what=f"install(directory={str(directory)!r}): {reason}.",
        fix=f"directory={DRIVE_FOLDER!r}",
        keys=("directory",),
        exit_code=3,
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _in_range(value: object, low: float, high: float) -> bool:
    """Whether `value` is a number from `low` to `high`; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
