"""Directories on a drive for tests, whatever the temporary folder lies on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from muon_offload_cli.machine.filesystem import inspect
from tests.fakes.fake_torchrun import HANG_S


def directory_on_a_drive(tmp_path: Path) -> Path:
    """Return a folder that stores may lie in; skips the test where the temporary folder is in memory."""
    mount = inspect(tmp_path)
    if mount.is_memory:
        pytest.skip(f"{tmp_path} is on {mount.kind}; set TMPDIR to a folder on a drive")
    return tmp_path


@contextmanager
def small_filesystem(tmp_path: Path, mib: int = 64) -> Iterator[Path]:
    """Mount an ext4 filesystem of `mib` MiB through a loop device; skips the test where it may not."""
    programs = {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for name in _PROGRAMS}
    if os.geteuid() != 0 or not all(programs.values()):
        pytest.skip("mounting a small filesystem needs root, mkfs.ext4, mount and umount")
    image, mount_point = tmp_path / "image", tmp_path / "small"
    mount_point.mkdir()
    with image.open("wb") as file:
        file.truncate(mib << 20)
    _call(programs["mkfs.ext4"], "-q", "-F", "-m", "0", str(image))
    mounted = _call(programs["mount"], "-o", "loop", str(image), str(mount_point), check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a loop device cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield mount_point
    finally:
        _call(programs["umount"], str(mount_point))


_PROGRAMS = ("mkfs.ext4", "mount", "umount")


def _call(program: str | None, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=check, timeout=HANG_S
    )
