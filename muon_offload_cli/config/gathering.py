"""Looking at the machine, so that the rules need not."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from muon_offload_cli.config import probe_cache
from muon_offload_cli.config.inputs import look_at_file, look_at_pretrained, look_at_script, megatron_beside
from muon_offload_cli.config.locations import (
    default_cache_directory,
    default_offload_directory,
    default_runs_directory,
    from_home,
)
from muon_offload_cli.config.probing import ProbeReport, ask_megatron, missing_parts
from muon_offload_cli.config.rules.data import data_files
from muon_offload_cli.config.rules.directory import ELSEWHERE, FOLDERS, KEY, PSEUDO_KINDS, uses_directory
from muon_offload_cli.config.rules.facts import (
    DirectoryFacts,
    MachineFacts,
    PlannedFacts,
)
from muon_offload_cli.config.rules.settings import value_of
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.vocabulary import BYTE_SOURCES
from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.machine import memory
from muon_offload_cli.machine.drives import recall
from muon_offload_cli.machine.filesystem import dangling_link, inspect, supports_direct_io
from muon_offload_cli.machine.limits import rank_limits
from muon_offload_cli.machine.write_test import write_test

CACHE = "data.cache_directory"
NOT_PLANNED = PlannedFacts()


def resolve_directory(config: Config) -> Config:
    """Fill in `offload.directory` if the engine keeps files and none is set; returns the same object.

    Raises:
        UserError: There is no place to default to.
    """
    if uses_directory(config) and config.offload.directory is None:
        config.offload.directory = [str(default_offload_directory())]
    return config


def gather_facts(
    config: Config,
    *,
    probe: bool,
    write: bool = False,
    planned: PlannedFacts = NOT_PLANNED,
    folders: Collection[str] = tuple(FOLDERS),
    data_problems: tuple[Problem, ...] = (),
) -> MachineFacts:
    """Look at the machine for `config`. Leaves nothing behind in the offload directory.

    Args:
        config: The composed run.
        probe: Ask Megatron too, in a subprocess unless it was asked before.
        write: Try writing and reading 16 MiB in the offload directory.
        planned: What the plan of the run says, if it was made.
        folders: Keys of the other folders to look at: those that will be written.
        data_problems: What a look at the data files found, if it was taken.
    """
    problems: list[Problem] = []
    directories: list[DirectoryFacts] = []
    for path in _directories(config, problems) if uses_directory(config) else []:
        try:
            directories.append(look_at_directory(path, write=write))
        except UserError as error:
            problems += error.problems
    looked_at = _folders(config, folders, problems)
    host = memory.inspect()
    scripts = [config.megatron.entrypoint] if config.megatron.entrypoint else []
    missing = missing_parts(config.megatron.path) if config.megatron.path is not None else ()
    report = ProbeReport()
    if probe and not missing:
        # Without a Megatron below megatron.path, another one would answer.
        report = ask_megatron(config.megatron.path, cache=probe_cache.cache_file())
    return MachineFacts(
        working_directory=Path.cwd(),
        directories=tuple(directories),
        folders=looked_at,
        files={
            **{path: look_at_file(path) for path in data_files(config)},
            **{path: look_at_script(path) for path in scripts},
        },
        data_problems=data_problems,
        pretrained=look_at_pretrained(Path(config.model.from_hf)) if config.model.from_hf else None,
        planned=planned,
        headroom_bytes=host.headroom_bytes,
        memory_limit_bytes=host.limit_bytes,
        limits=rank_limits(),
        cuda_available=report.cuda_available,
        num_gpus=report.num_gpus,
        megatron=report.megatron,
        megatron_missing=missing,
        megatron_beside_script=next((megatron_beside(each, config.megatron.path) for each in scripts), None),
        problems=(*problems, *report.problems),
        muon_problems=report.muon_problems,
    )


def _directories(config: Config, problems: list[Problem]) -> list[Path]:
    if config.offload.directory is not None:
        paths = [Path(os.path.normpath(directory)) for directory in config.offload.directory]
        # The rules refuse the others.
        return list(dict.fromkeys(path for path in paths if path.is_absolute()))
    try:
        return [default_offload_directory()]
    except UserError as error:
        problems += error.problems
        return []


def _folders(config: Config, keys: Collection[str], problems: list[Problem]) -> dict[str, DirectoryFacts]:
    """Look at the other folders that the run writes into, by key: those that it names, and its own."""
    found: dict[str, DirectoryFacts] = {}
    for key in keys:
        if key == CACHE and config.data.source not in BYTE_SOURCES:
            continue
        try:
            path = value_of(config, key)
            if path is None:
                path = _default_folder(config, key)
            if path:  # A rule refuses empty ones.
                found[key] = look_at_directory(Path.cwd() / from_home(str(path)), write=False, key=key)
        except UserError as error:
            problems += error.problems
    return found


def _default_folder(config: Config, key: str) -> Path | None:
    """Return where a run writes what `key` names no folder for; None: nowhere, or it may have no need to."""
    if key == "run.directory":
        return default_runs_directory(config.recipe)
    # A cache that is there may hold the tokens, and is then not written.
    if key != CACHE or os.path.isdir(default_cache_directory()):  # noqa: PTH112 - Path's raises where it may not look
        return None
    return default_cache_directory()


def look_at_directory(path: Path, *, write: bool, key: str = KEY) -> DirectoryFacts:
    """Return the facts of an absolute directory, which need not exist; nothing is left behind in it.

    Args:
        path: The directory.
        write: Try writing and reading 16 MiB, in its nearest existing parent if it does not exist.
        key: The key that names it, for the message.

    Raises:
        UserError: It cannot be looked at.
    """
    try:
        mount = inspect(path)
        nearest = mount.existing
        is_folder = nearest.is_dir()
        usable = mount.writable and is_folder and not mount.is_memory and mount.kind not in PSEUDO_KINDS
        measured = recall(mount.mount_point)
        return DirectoryFacts(
            path=path,
            nearest=nearest,
            exists=nearest == mount.directory,
            is_folder=is_folder,
            mount_point=Path(mount.mount_point or "/"),
            device=mount.device,
            kind=mount.kind,
            is_memory=mount.is_memory,
            is_network=mount.is_network,
            free_bytes=mount.free_bytes,
            writable=mount.writable,
            read_only=mount.read_only,
            dangling=mount.directory if dangling_link(path) else None,
            direct_io=supports_direct_io(nearest) if usable else None,
            write_error=write_test(nearest) if usable and write else None,
            bytes_per_s=None if measured is None else measured.read + measured.written,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            problems=[
                Problem(
                    what=f"{key}={str(path)[:200]} cannot be looked at: {reason}.",
                    fix=ELSEWHERE if key == KEY else FOLDERS[key],
                    keys=(key,),
                    exit_code=3,
                )
            ]
        ) from error
