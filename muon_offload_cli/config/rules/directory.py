"""The folder that the state goes to."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

from muon_offload_cli.config.rules.facts import DirectoryFacts, MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.errors import Level, Problem
from muon_offload_cli.units import format_bytes

KEY = "offload.directory"
_ELSEWHERE = f"{KEY}=/absolute/folder/on/a/local/drive"
DISK_ENGINES = (Engine.disk, Engine.mapped)
# Views of the kernel, whose "free space" means nothing even where root may write.
_PSEUDO_KINDS = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs", "mqueue"}
)


def uses_directory(config: Config) -> bool:
    """Tell whether the engine keeps state in files."""
    return config.offload.engine in DISK_ENGINES


def _known(config: Config, facts: MachineFacts) -> DirectoryFacts | None:
    return facts.directory if uses_directory(config) else None


@rule(name="directory-absolute", reason="Ranks may start in other folders than the launcher.")
def absolute(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse relative and empty paths."""
    directory = config.offload.directory
    if not uses_directory(config) or directory is None or Path(directory).is_absolute():
        return
    guess = facts.working_directory is not None and directory and not directory.startswith(("~", "$"))
    fix = f"{KEY}={facts.working_directory}/{directory}" if guess else _ELSEWHERE
    yield Problem(what=f"{KEY}={directory or repr(directory)} is no absolute path.", fix=fix, keys=(KEY,))


@rule(name="directory-folder", reason="State goes into a folder.", machine=True)
def is_folder(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a path that is, or goes through, a file."""
    known = _known(config, facts)
    if known is not None and not known.is_folder:
        what = f"{KEY}={known.path}: {known.nearest} is a file, not a folder."
        yield Problem(what=what, fix=_ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(
    name="directory-memory",
    reason="A filesystem in memory is the memory that the state is meant to leave.",
    machine=True,
)
def in_memory(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse tmpfs and ramfs by name."""
    known = _known(config, facts)
    if known is not None and known.is_memory:
        what = f"{KEY}={known.path} is on {known.mount_point} ({known.kind}): memory, not a disk."
        yield Problem(what=what, fix=_ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(name="directory-pseudo", reason="Views of the kernel keep no files.", machine=True)
def pseudo(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse /proc, /sys and their kind."""
    known = _known(config, facts)
    if known is not None and known.kind in _PSEUDO_KINDS:
        what = f"{KEY}={known.path} is on {known.mount_point} ({known.kind}), which keeps no files."
        yield Problem(what=what, fix=_ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(
    name="directory-writable", reason="The folder is made and written by the user who trains.", machine=True
)
def writable(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a folder that cannot be written, or cannot be made in its nearest existing parent."""
    known = _known(config, facts)
    if known is None or known.writable or not known.is_folder:
        return
    if known.exists:
        what = f"{KEY}={known.path} is not writable by this user."
    else:
        what = f"{KEY}={known.path} does not exist, and {known.nearest} is not writable by this user."
    yield Problem(what=what, fix=_ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(
    name="directory-keeps",
    reason="A drive that loses bytes is found before it holds a run's state.",
    machine=True,
)
def keeps(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a folder where 16 MiB could not be written and read back unchanged."""
    known = _known(config, facts)
    if known is not None and known.write_error:
        what = f"{KEY}={known.path} ({known.kind}): {known.write_error}."
        yield Problem(what=what, fix=_ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(name="directory-space", reason="A disk that is too small is told before step 1.", machine=True)
def space(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a filesystem with less room than all ranks of the node need."""
    known = _known(config, facts)
    if known is None or known.free_bytes is None or facts.planned.needed_bytes is None:
        return
    missing = facts.planned.needed_bytes - known.free_bytes
    if missing > 0:
        ranks = config.launcher.ranks_per_node
        yield Problem(
            what=f"{ranks} ranks need {format_bytes(facts.planned.needed_bytes)} on {known.mount_point} "
            f"({known.kind}), which has {format_bytes(known.free_bytes)} free ({KEY}={known.path}).",
            fix=f"free {format_bytes(missing)}, set {KEY} to a larger mount, or raise the data-parallel size",
            keys=(KEY,),
            exit_code=3,
        )


@rule(
    name="directory-network",
    reason="A network filesystem is shared and slow; node-local is meant.",
    machine=True,
)
def network(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of filesystems reached over a network or through FUSE."""
    known = _known(config, facts)
    if known is not None and known.is_network:
        what = f"{KEY}={known.path} is on {known.mount_point} ({known.kind}), a network or FUSE filesystem."
        yield Problem(what=what, fix=_ELSEWHERE, keys=(KEY,), level=Level.WARNING)


@rule(name="directory-overlay", reason="A container's overlay passes through two filesystems.", machine=True)
def overlay(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Note an overlay: it works, a mounted volume is faster."""
    known = _known(config, facts)
    if known is not None and known.kind == "overlay":
        what = f"{KEY}={known.path} is on a container's overlay; a mounted volume would be faster."
        yield Problem(what=what, fix=_ELSEWHERE, keys=(KEY,), level=Level.NOTE)


@rule(name="direct-io", reason="Without O_DIRECT the page cache takes memory and copies.", machine=True)
def direct_io(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn where O_DIRECT is refused and the disk engine would fall back to buffered I/O."""
    known = _known(config, facts)
    if known is None or known.is_memory or config.offload.engine is not Engine.disk:
        return
    if known.direct_io is False:
        what = f"{KEY}={known.path} ({known.kind}) refuses O_DIRECT; buffered I/O would be used."
        yield Problem(what=what, fix=_ELSEWHERE, keys=(KEY,), level=Level.WARNING)
