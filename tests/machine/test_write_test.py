"""A directory is trusted with a run's state only if it gives back what was written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from muon_offload_cli.machine import write_test as module
from muon_offload_cli.machine.write_test import write_test

SMALL = 64 * 1024


def test_a_good_directory_gives_back_what_was_written_and_is_left_empty(tmp_path: Path) -> None:
    assert write_test(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "No such file or directory" in write_test(tmp_path / "missing")


def test_bytes_that_change_on_the_way_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def flipping(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        if offset == 0 and len(buffers[0]) == SMALL:
            buffers[0][SMALL - 1] ^= 1
        return count

    monkeypatch.setattr(module.os, "preadv", flipping)
    assert write_test(tmp_path, SMALL) == "64.00 KiB that were written came back changed"


def test_a_file_that_ends_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "enable_direct_io", lambda fd: False)
    monkeypatch.setattr(module.os, "preadv", lambda fd, buffers, offset: 0)
    assert "came back changed" in write_test(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.ENOSPC, "writing and reading 64.00 KiB failed (No space left on device)"),
        (errno.EFBIG, ""),  # A limit of the shell's is no fault of the drive.
    ],
)
def test_a_full_drive_is_told_by_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, told: str
) -> None:
    def full(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, "enable_direct_io", lambda fd: False)
    monkeypatch.setattr(module.os, "pwritev", full)
    assert write_test(tmp_path, SMALL) == told
