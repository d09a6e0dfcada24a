"""Looking at the machine, so that the rules need not."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muon_offload_cli.config.locations import default_offload_directory
from muon_offload_cli.config.rules.data import data_files
from muon_offload_cli.config.rules.directory import KEY, uses_directory
from muon_offload_cli.config.rules.facts import DirectoryFacts, FileFacts, MachineFacts
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import Problem, UserError

PROBE_MODULE = "muon_offload_cli.megatron.probe"
# Importing torch and Megatron takes 3 s on an idle machine, and a minute from a cold network disk.
PROBE_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What the probe of Megatron said; None for what it could not say."""

    megatron_version: str | None = None
    flags: frozenset[str] | None = None
    cuda_available: bool | None = None
    num_gpus: int | None = None
    problems: tuple[Problem, ...] = ()


def resolve_directory(config: Config) -> Config:
    """Fill in `offload.directory` if the engine keeps files and none is set; returns the same object.

    Raises:
        UserError: There is no place to default to.
    """
    if uses_directory(config) and config.offload.directory is None:
        config.offload.directory = str(default_offload_directory())
    return config


def needs_probe(config: Config) -> bool:
    """Tell whether a rule needs Megatron's parser or torch, which take seconds to import."""
    return bool(config.megatron.args) or config.device is Device.cuda or config.megatron.path is not None


def gather_facts(
    config: Config,
    *,
    probe: bool,
    needed_bytes: int | None = None,
    probe_timeout_s: float = PROBE_TIMEOUT_S,
) -> MachineFacts:
    """Look at the machine for `config`. Creates nothing.

    Args:
        config: The composed run.
        probe: Ask Megatron too, in a subprocess.
        needed_bytes: Bytes that all ranks of this node will reserve, if they are planned.
        probe_timeout_s: How long the probe may take.
    """
    problems: list[Problem] = []
    directory: DirectoryFacts | None = None
    if uses_directory(config):
        try:
            path = (
                default_offload_directory()
                if config.offload.directory is None
                else Path(config.offload.directory)
            )
            directory = _look_at_directory(path) if path.is_absolute() else None
        except UserError as error:
            problems += error.problems
    report = ask_megatron(config, timeout_s=probe_timeout_s) if probe else ProbeReport()
    return MachineFacts(
        working_directory=Path.cwd(),
        directory=directory,
        files={path: _look_at_file(path) for path in data_files(config)},
        needed_bytes=needed_bytes,
        cuda_available=report.cuda_available,
        num_gpus=report.num_gpus,
        megatron_version=report.megatron_version,
        megatron_flags=report.flags,
        problems=(*problems, *report.problems),
    )


def _look_at_directory(path: Path) -> DirectoryFacts:
    from muon_offload_cli.machine.filesystem import inspect, supports_direct_io

    try:
        mount = inspect(path)
        nearest = mount.existing
        is_folder = nearest.is_dir()
        usable = mount.writable and is_folder and not mount.is_memory
        return DirectoryFacts(
            path=path,
            nearest=nearest,
            exists=nearest == mount.directory,
            is_folder=is_folder,
            mount_point=Path(mount.mount_point or "/"),
            kind=mount.kind,
            is_memory=mount.is_memory,
            is_network=mount.is_network or mount.kind.startswith("fuse"),
            free_bytes=mount.free_bytes,
            writable=mount.writable,
            direct_io=supports_direct_io(nearest) if usable else None,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            problems=[
                Problem(
                    what=f"{KEY}={str(path)[:200]} cannot be looked at: {reason}.",
                    fix=f"{KEY}=/absolute/folder/on/a/local/drive",
                    keys=(KEY,),
                    exit_code=3,
                )
            ]
        ) from error


def _look_at_file(name: str) -> FileFacts:
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return FileFacts(num_bytes=None, is_folder=True)
        return FileFacts(num_bytes=path.stat().st_size, readable=os.access(path, os.R_OK))
    except (OSError, ValueError):
        return FileFacts(num_bytes=None)


def ask_megatron(
    config: Config, *, timeout_s: float = PROBE_TIMEOUT_S, command: Sequence[str] | None = None
) -> ProbeReport:
    """Run the probe in a subprocess, because it imports torch and Megatron.

    Args:
        config: For `megatron.path`, which goes before the installed package.
        timeout_s: How long it may take.
        command: Another command in its place, for tests.

    Returns:
        What it said; a probe that failed or hung is a problem of exit code 3.
    """
    environment = dict(os.environ)
    if config.megatron.path:
        root = str(Path(config.megatron.path).expanduser().absolute())
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    arguments = list(command) if command is not None else [sys.executable, "-m", PROBE_MODULE]
    try:
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return _failed(f"gave no answer in {timeout_s:g} s", arguments)
    except OSError as error:
        return _failed(f"could not be started ({error.strerror})", arguments)
    answer = _last_object(done.stdout)
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return _failed(f"exited with {done.returncode}: {last[:300]}", arguments)
    return _read_answer(answer)


def _last_object(text: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object: imports may print lines of their own before it."""
    for line in reversed(text.strip().splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def _read_answer(answer: dict[str, Any]) -> ProbeReport:
    flags = answer.get("flags")
    cuda = answer.get("cuda_available")
    gpus = answer.get("num_gpus")
    version = answer.get("megatron_version")
    return ProbeReport(
        megatron_version=str(version) if version else None,
        flags=frozenset(str(flag).lstrip("-").replace("-", "_") for flag in flags) if flags else None,
        cuda_available=cuda if isinstance(cuda, bool) else None,
        num_gpus=gpus if isinstance(gpus, int) else None,
        problems=tuple(
            Problem(
                what=str(problem.get("what", "")),
                fix=str(problem.get("fix", "")),
                exit_code=int(problem.get("exit_code", 3)),
            )
            for problem in answer.get("problems", [])
            if isinstance(problem, dict)
        ),
    )


def _failed(reason: str, arguments: Sequence[str]) -> ProbeReport:
    shown = shlex.join(arguments)
    return ProbeReport(
        problems=(
            Problem(
                what=f"asking Megatron for its flags failed: the probe {reason}.",
                fix=f"see: {shown}",
                exit_code=3,
            ),
        )
    )
