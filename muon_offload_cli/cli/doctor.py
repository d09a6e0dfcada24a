"""``muon-offload doctor``: what this machine has for a run, in one table."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muon_offload_cli.errors import visible

if TYPE_CHECKING:
    from muon_offload_cli.config.diagnosis import Finding, Machine

DOES_NOT_FIT = 3
_COLOURS = {"fine": "green", "warning": "bold yellow", "broken": "bold red"}
# Filesystems of drives that a mount table may name; others are views of the kernel or memory.
_DRIVE_KINDS = frozenset(
    {"btrfs", "bcachefs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "xfs", "zfs"}
)
_SYSTEM_MOUNTS = ("/boot", "/dev", "/etc", "/nix", "/proc", "/run", "/snap", "/sys", "/usr", "/var/lib")
_MOST_CANDIDATES = 8
# In a file or a log, which have no width, longer lines than this are hard to read.
_WIDEST = 160


def doctor(
    megatron: Annotated[
        Path | None,
        typer.Option(
            "--megatron",
            metavar="FOLDER",
            help="A checkout of Megatron to look at, as megatron.path.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Look at this machine: software, GPUs, memory, drives and limits, each fine or with a fix.

    Exits with 2 if --megatron is no Megatron, with 3 if something is broken.
    """
    from muon_offload_cli.config.diagnosis import State, diagnose
    from muon_offload_cli.config.probing import missing_parts
    from muon_offload_cli.errors import wrong

    if megatron is not None and (missing := missing_parts(str(megatron))):
        # The installed one would answer in its place.
        raise wrong(
            f"--megatron {megatron} is no Megatron: it has no {' and no '.join(missing)}.",
            "--megatron /path/of/a/checkout, or leave it out to look at the installed one",
        )
    findings = diagnose(look(megatron))
    if json:
        typer.echo(json_module.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _draw(findings)
    raise typer.Exit(DOES_NOT_FIT if any(row.state is State.BROKEN for row in findings) else 0)


def look(megatron: Path | None) -> Machine:
    """Look at everything; Megatron is asked afresh, in a process of its own."""
    from muon_offload_cli.config.diagnosis import Machine
    from muon_offload_cli.config.gathering import look_at_directory
    from muon_offload_cli.config.probing import ask_megatron
    from muon_offload_cli.errors import UserError
    from muon_offload_cli.machine import memory
    from muon_offload_cli.machine.cgroup import memory_groups
    from muon_offload_cli.machine.devices import gpu_count
    from muon_offload_cli.machine.limits import rank_limits

    try:
        figures = memory.inspect()
    except OSError:
        figures = None
    scratch = []
    for path in _candidates()[:_MOST_CANDIDATES]:
        try:
            scratch.append(look_at_directory(path, write=True))
        except UserError:
            continue
    groups = memory_groups()
    return Machine(
        python=tuple(sys.version_info[:3]),
        executable=sys.executable,
        report=ask_megatron(str(megatron) if megatron is not None else None),
        gpus=gpu_count(),
        memory=figures,
        cgroup_version=groups[0].version if groups else None,
        limits=rank_limits(),
        scratch=scratch,
    )


def _candidates() -> list[Path]:
    from muon_offload_cli.config.diagnosis import scratch_paths
    from muon_offload_cli.config.locations import default_offload_directory
    from muon_offload_cli.errors import UserError
    from muon_offload_cli.machine.filesystem import is_network_kind
    from muon_offload_cli.machine.mounts import read_mounts

    try:
        default = default_offload_directory()
    except UserError:
        default = None
    try:
        mounts = read_mounts()
    except OSError:
        mounts = []
    drives = [
        mount.mount_point
        for mount in mounts
        if (mount.kind in _DRIVE_KINDS or is_network_kind(mount.kind))
        and mount.mount_point != "/"
        and not mount.mount_point.startswith(_SYSTEM_MOUNTS)
        and Path(mount.mount_point).is_dir()
    ]
    return scratch_paths(os.environ.get("SCRATCH", ""), default, drives)


def _draw(findings: Sequence[Finding]) -> None:
    from rich.text import Text

    from muon_offload_cli.cli.table import print_table
    from muon_offload_cli.cli.train_view import make_console

    console = make_console()
    console.width = min(console.width, _WIDEST)
    rows = [
        (
            visible(row.name),
            Text(row.state.value, style=_COLOURS[row.state.value]),
            visible(row.found),
            visible(row.fix),
        )
        for row in findings
    ]
    print_table(console, ("check", "state", "found", "fix"), rows)
