"""The folder that the state goes to, and the others that a run writes into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

from muon_offload_cli.config.rules.facts import DirectoryFacts, MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.errors import Level, Problem, command, override

KEY = "offload.directory"
ELSEWHERE = f"{KEY}=/absolute/folder/on/a/local/drive"
FOLDERS = {
    "checkpoint.directory": "checkpoint.directory=/a/folder/that/all/nodes/reach",
    "run.directory": "run.directory=/a/folder/that/you/may/write",
    "data.cache_directory": "data.cache_directory=/a/folder/that/you/may/write",
}
"""The other folders that a run may name to write into, each with another in its place."""
DISK_ENGINES = (Engine.disk, Engine.mapped)
# Views of the kernel, whose "free space" means nothing even where root may write.
PSEUDO_KINDS = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs", "mqueue"}
)


def uses_directory(config: Config) -> bool:
    """Tell whether the engine keeps state in files."""
    return config.offload.engine in DISK_ENGINES


def as_word(directories: Sequence[str]) -> str:
    """Show the value as on a command line: one folder, or a list in brackets."""
    return directories[0] if len(directories) == 1 else f"[{','.join(directories)}]"


def one_or_several(directories: Sequence[str]) -> str | Sequence[str]:
    """Return the value for `override`: a text for one folder."""
    return directories[0] if len(directories) == 1 else directories


def known_of(config: Config, facts: MachineFacts) -> tuple[DirectoryFacts, ...]:
    """Return the facts of each directory that the engine uses."""
    return facts.directories if uses_directory(config) else ()


def _those(
    config: Config, facts: MachineFacts, unfit: Callable[[DirectoryFacts], bool], *, others: bool = False
) -> Iterator[tuple[str, DirectoryFacts, str]]:
    """Yield key, facts and fix of each folder that is unfit; of several for the state, the fit ones stay.

    Args:
        config: The run.
        facts: What is known of its folders.
        unfit: Tells what is wrong with one.
        others: Judge those that do not hold the state too.
    """
    known = known_of(config, facts)
    fit = [str(each.path) for each in known if not unfit(each)]
    for each in filter(unfit, known):
        yield KEY, each, override(KEY, one_or_several(fit)) if fit else ELSEWHERE
    for key, each in facts.folders.items() if others else ():
        if unfit(each):
            yield key, each, FOLDERS[key]


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
        fix=override(KEY, one_or_several(absolute)) if guess else ELSEWHERE,
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
        missing = not known.exists and known.is_folder and known.dangling is None
        if KEY in written and missing and known.mount_point == Path("/"):
            yield Problem(
                what=f"{KEY}={known.path} does not exist and would be made on the root filesystem "
                f"({known.kind}): is its drive mounted?",
                fix="mount the drive, or, if that is where it is meant to be: "
                + command("mkdir", "-p", known.path),
                keys=(KEY,),
                level=Level.WARNING,
            )


@rule(name="directory-folder", reason="What a run writes goes into a folder.", machine=True)
def is_folder(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a path that is, or goes through, a file."""
    for key, known, fix in _those(config, facts, lambda each: not each.is_folder, others=True):
        what = f"{key}={known.path}: {known.nearest} is a file, not a folder."
        yield Problem(what=what, fix=fix, keys=(key,), exit_code=3)


@rule(
    name="directory-link",
    reason="No folder can be made in the place of a link that leads nowhere.",
    machine=True,
)
def dangling(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a path with a link whose target does not exist."""
    for key, known, _ in _those(config, facts, lambda each: each.dangling is not None, others=True):
        what = f"{key}={known.path} leads through a link to {known.dangling}, which does not exist."
        yield Problem(what=what, fix=command("mkdir", "-p", known.dangling or ""), keys=(key,), exit_code=3)


@rule(
    name="directory-memory",
    reason="A filesystem in memory is the memory that the state is meant to leave.",
    machine=True,
)
def in_memory(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse tmpfs and ramfs by name."""
    for key, known, fix in _those(config, facts, lambda each: each.is_memory):
        what = f"{key}={known.path} is on {known.mount_point} ({known.kind}): memory, not a disk."
        yield Problem(what=what, fix=fix, keys=(key,), exit_code=3)


@rule(name="directory-pseudo", reason="Views of the kernel keep no files.", machine=True)
def pseudo(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse /proc, /sys and their kind."""
    for key, known, fix in _those(config, facts, lambda each: each.kind in PSEUDO_KINDS, others=True):
        what = f"{key}={known.path} is on {known.mount_point} ({known.kind}), which keeps no files."
        yield Problem(what=what, fix=fix, keys=(key,), exit_code=3)


@rule(
    name="directory-writable", reason="The folder is made and written by the user who trains.", machine=True
)
def writable(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a folder that cannot be written, or cannot be made in its nearest existing parent."""
    for key, known, fix in _those(
        config,
        facts,
        lambda each: each.is_folder and not each.writable and each.kind not in PSEUDO_KINDS,
        others=True,
    ):
        if known.read_only:
            what = f"{key}={known.path} is on {known.mount_point} ({known.kind}), which is mounted read-only."
        elif known.exists:
            what = f"{key}={known.path} is not writable by this user."
        else:
            what = f"{key}={known.path} does not exist, and {known.nearest} is not writable by this user."
        yield Problem(what=what, fix=fix, keys=(key,), exit_code=3)


@rule(
    name="directory-keeps",
    reason="A drive that loses bytes is found before it holds a run's state.",
    machine=True,
)
def keeps(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a folder where 16 MiB could not be written and read back unchanged."""
    for key, known, fix in _those(config, facts, lambda each: bool(each.write_error)):
        what = f"{key}={known.path} ({known.kind}): {known.write_error}."
        yield Problem(what=what, fix=fix, keys=(key,), exit_code=3)


@rule(
    name="directory-network",
    reason="A network filesystem is shared and slow; node-local is meant.",
    machine=True,
)
def network(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of filesystems reached over a network or through FUSE."""
    for key, known, fix in _those(config, facts, lambda each: each.is_network):
        what = f"{key}={known.path} is on {known.mount_point} ({known.kind}), a network or FUSE filesystem."
        yield Problem(what=what, fix=fix, keys=(key,), level=Level.WARNING)


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
    for key, known, fix in _those(config, facts, lambda each: each.direct_io is False and not each.is_memory):
        what = f"{key}={known.path} ({known.kind}) refuses O_DIRECT; buffered I/O would be used."
        yield Problem(what=what, fix=fix, keys=(key,), level=Level.WARNING)
