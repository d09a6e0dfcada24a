"""Control groups that hold a benchmark to a rate of the drive and an amount of memory.

Files and meanings: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/blkio-controller.rst and memory.rst of
the Linux kernel. Version 1 holds back direct I/O and reads, but not what the kernel writes back from the page
cache.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from muon_offload_cli.machine.cgroup import own_folders
from muon_offload_cli.machine.filesystem import inspect

MB = 1_000_000
CONTROLLERS = {"--drive-mb-s": ("blkio", "io"), "--memory-max-gib": ("memory", "memory")}
"""Names of what an option needs, in version 1 and 2."""
ABSENT_WITHOUT_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")


def add_drive_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drive-mb-s",
        type=float,
        help="let the drive read and write N MB/s each, by a control group (as root)",
    )


@contextmanager
def steady_drive(directory: Path, mb_s: float | None) -> Iterator[Path | None]:
    """Hold the drive below a directory to one rate a direction, for this process and all that it starts.

    Yields:
        The group in which those of single runs must lie (version 2); None where they need not.
    """
    option = "--drive-mb-s"
    if mb_s is None:
        yield None
        return
    mount = inspect(directory.absolute())
    disk = disk_of(mount.device)
    if disk is None:
        raise SystemExit(f"{option}: {mount.mount_point} ({mount.kind}) has no one block device below it")
    version, folders = hierarchy(option)
    # Ended by a signal, the group must go too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    parent = folders[0] if version == 1 else folders[-1]
    with _group(option, version, [parent], drive_limits(version, disk, round(mb_s * MB))) as group:
        # In version 2 a group hands controllers down or has processes of its own.
        inner = group / "benchmark" if version == 2 else group
        inner.mkdir(exist_ok=True)
        try:
            _write(option, inner / "cgroup.procs", str(os.getpid()))
            print(
                f"drive {disk} held to {mb_s:g} MB/s read and {mb_s:g} MB/s written (cgroup v{version})",
                flush=True,
            )
            yield group if version == 2 else None
        finally:
            try:
                _write(option, folders[0] / "cgroup.procs", str(os.getpid()))
            finally:
                if inner != group:
                    _remove(inner)


@contextmanager
def memory_limit(gib: float | None, inside: Path | None) -> Iterator[Path | None]:
    """Make a group with a memory limit for one run; None without a limit.

    Args:
        gib: The limit; no swap beyond it.
        inside: What `steady_drive` gave.
    """
    option = "--memory-max-gib"
    if gib is None:
        yield None
        return
    version, folders = hierarchy(option)
    handing_down = [folders[-1], inside] if inside else [folders[-1]]
    parents = folders[:1] if version == 1 else handing_down
    with _group(option, version, parents, memory_limits(version, round(gib * 2**30))) as group:
        yield group


def disk_of(device: int, root: Path = Path("/")) -> str | None:
    """Return ``major:minor`` of the whole disk of a file system, since partitions take no limits.

    Args:
        device: ``st_dev`` of a file; None is returned where it is no block device (memory, network, overlay).
        root: Where ``sys`` is.
    """
    folder = (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    number = folder / "dev"
    return number.read_text().strip() if number.exists() else None


def drive_limits(version: int, disk: str, bytes_per_s: int) -> dict[str, str]:
    """Return what to write into which file."""
    if version == 2:
        return {"io.max": f"{disk} rbps={bytes_per_s} wbps={bytes_per_s}"}
    return {f"blkio.throttle.{way}_bps_device": f"{disk} {bytes_per_s}" for way in ("read", "write")}


def memory_limits(version: int, nbytes: int) -> dict[str, str]:
    """Return what to write into which file, in this order."""
    if version == 2:
        return {"memory.max": str(nbytes), "memory.swap.max": "0"}
    return {"memory.limit_in_bytes": str(nbytes), "memory.memsw.limit_in_bytes": str(nbytes)}


def hierarchy(option: str, root: Path = Path("/")) -> tuple[int, list[Path]]:
    """Return version and folders of the hierarchy that has what an option needs; refuse where none has it."""
    old, new = CONTROLLERS[option]
    for version, folders in own_folders(old, root):
        known = folders[-1] / "cgroup.controllers"
        if folders[0].exists() and (version == 1 or new in known.read_text().split()):
            return version, folders
    raise SystemExit(
        f"{option}: no control group here has the controller {new} (version 2) or {old} (version 1)"
    )


@contextmanager
def _group(option: str, version: int, parents: list[Path], limits: dict[str, str]) -> Iterator[Path]:
    """Make a group in the last of `parents`, each of which hands its controller down."""
    if version == 2:
        for parent in parents:
            _write(option, parent / "cgroup.subtree_control", f"+{CONTROLLERS[option][1]}")
    try:
        group = Path(tempfile.mkdtemp(prefix="muon_bench_", dir=parents[-1]))
    except OSError as error:
        raise SystemExit(f"{option}: no group can be made in {parents[-1]}: {error.strerror}") from None
    try:
        for name, text in limits.items():
            if name not in ABSENT_WITHOUT_SWAP or (group / name).exists():
                _write(option, group / name, text)
        yield group
    finally:
        _remove(group)


def _write(option: str, file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise SystemExit(f"{option}: {text!r} cannot be written to {file}: {error.strerror}") from None


def _remove(group: Path) -> None:
    """Remove a group once its last process is gone."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    print(f"{group} still has processes; remove it when they are gone", file=sys.stderr)
