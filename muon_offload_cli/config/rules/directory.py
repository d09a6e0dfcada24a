"""The folder that the state goes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from muon_offload_cli.config.rules.facts import DirectoryFacts, MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.errors import Level, Problem

KEY = "offload.directory"
ELSEWHERE = f"{KEY}=/absolute/folder/on/a/local/drive"
DISK_ENGINES = (Engine.disk, Engine.mapped)
# Views of the kernel, whose "free space" means nothing even where root may write.
_PSEUDO_KINDS = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs", "mqueue"}
)


def uses_directory(config: Config) -> bool:
    """Tell whether the engine keeps state in files."""
    return config.offload.engine in DISK_ENGINES


def as_word(directories: Sequence[str]) -> str:
    """Write the value as on a command line: one folder, or a list in brackets."""
    return directories[0] if len(directories) == 1 else f"[{','.join(directories)}]"


def known_of(config: Config, facts: MachineFacts) -> tuple[DirectoryFacts, ...]:
    """Return the facts of each directory that the engine uses."""
    return facts.directories if uses_directory(config) else ()


@rule(name="directory-absolute", reason="Ranks may start in other folders than the launcher.")
def absolute(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse relative and empty paths."""
    directories = config.offload.directory or []
    relative = [directory for directory in directories if not Path(directory).is_absolute()]
    if not uses_directory(config) or not relative:
        return
    guess = facts.working_directory is not None and not any(
        not directory or directory.startswith(("~", "$")) for directory in relative
    )
    absolute = [
        f"{facts.working_directory}/{directory}" if directory in relative else directory
        for directory in directories
    ]
    shown = as_word([directory or repr(directory) for directory in relative])
    are = "is no absolute path" if len(relative) == 1 else "are no absolute paths"
    yield Problem(
        what=f"{KEY}={shown} {are}.",
        fix=f"{KEY}={as_word(absolute)}" if guess else ELSEWHERE,
        keys=(KEY,),
    )


@rule(
    name="directory-root",
    reason="Where a drive is not mounted, its folder would be made on the root filesystem in silence.",
    machine=True,
)
def on_root(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of a directory that was named, does not exist, and would lie on the root filesystem."""
    for known in known_of(config, facts):
        if KEY in written and not known.exists and known.mount_point == Path("/") and known.is_folder:
            yield Problem(
                what=f"{KEY}={known.path} does not exist and would be made on the root filesystem "
                f"({known.kind}): is its drive mounted?",
                fix=f"mount the drive, or, if that is where it is meant to be: mkdir -p {known.path}",
                keys=(KEY,),
                level=Level.WARNING,
            )


@rule(name="directory-folder", reason="State goes into a folder.", machine=True)
def is_folder(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a path that is, or goes through, a file."""
    for known in known_of(config, facts):
        if not known.is_folder:
            what = f"{KEY}={known.path}: {known.nearest} is a file, not a folder."
            yield Problem(what=what, fix=ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(
    name="directory-memory",
    reason="A filesystem in memory is the memory that the state is meant to leave.",
    machine=True,
)
def in_memory(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse tmpfs and ramfs by name."""
    for known in known_of(config, facts):
        if known.is_memory:
            what = f"{KEY}={known.path} is on {known.mount_point} ({known.kind}): memory, not a disk."
            yield Problem(what=what, fix=ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(name="directory-pseudo", reason="Views of the kernel keep no files.", machine=True)
def pseudo(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse /proc, /sys and their kind."""
    for known in known_of(config, facts):
        if known.kind in _PSEUDO_KINDS:
            what = f"{KEY}={known.path} is on {known.mount_point} ({known.kind}), which keeps no files."
            yield Problem(what=what, fix=ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(
    name="directory-writable", reason="The folder is made and written by the user who trains.", machine=True
)
def writable(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a folder that cannot be written, or cannot be made in its nearest existing parent."""
    for known in known_of(config, facts):
        if known.writable or not known.is_folder:
            continue
        if known.exists:
            what = f"{KEY}={known.path} is not writable by this user."
        else:
            what = f"{KEY}={known.path} does not exist, and {known.nearest} is not writable by this user."
        yield Problem(what=what, fix=ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(
    name="directory-keeps",
    reason="A drive that loses bytes is found before it holds a run's state.",
    machine=True,
)
def keeps(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a folder where 16 MiB could not be written and read back unchanged."""
    for known in known_of(config, facts):
        if known.write_error:
            what = f"{KEY}={known.path} ({known.kind}): {known.write_error}."
            yield Problem(what=what, fix=ELSEWHERE, keys=(KEY,), exit_code=3)


@rule(
    name="directory-network",
    reason="A network filesystem is shared and slow; node-local is meant.",
    machine=True,
)
def network(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of filesystems reached over a network or through FUSE."""
    for known in known_of(config, facts):
        if known.is_network:
            what = (
                f"{KEY}={known.path} is on {known.mount_point} ({known.kind}), a network or FUSE filesystem."
            )
            yield Problem(what=what, fix=ELSEWHERE, keys=(KEY,), level=Level.WARNING)


@rule(name="directory-overlay", reason="A container's overlay passes through two filesystems.", machine=True)
def overlay(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Note an overlay: it works, a mounted volume is faster."""
    for known in known_of(config, facts):
        if known.kind == "overlay":
            what = f"{KEY}={known.path} is on a container's overlay; a mounted volume would be faster."
            yield Problem(what=what, fix=ELSEWHERE, keys=(KEY,), level=Level.NOTE)


@rule(name="direct-io", reason="Without O_DIRECT the page cache takes memory and copies.", machine=True)
def direct_io(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn where O_DIRECT is refused and the disk engine would fall back to buffered I/O."""
    if config.offload.engine is not Engine.disk:
        return
    for known in known_of(config, facts):
        if known.direct_io is False and not known.is_memory:
            what = f"{KEY}={known.path} ({known.kind}) refuses O_DIRECT; buffered I/O would be used."
            yield Problem(what=what, fix=ELSEWHERE, keys=(KEY,), level=Level.WARNING)
