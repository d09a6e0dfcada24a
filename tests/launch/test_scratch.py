"""Folders of rehearsals: the next one removes those of killed ones, and no other."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from muon_offload_cli.launch.scratch import remove_left_over, scratch_folder


def killed(directory: Path) -> Path:
    """Leave what a rehearsal leaves that SIGKILL ended."""
    with scratch_folder(directory) as scratch:
        (scratch.path / "state").write_text("x")
        locks = {path: path.read_bytes() for path in scratch.path.glob(".lock*")}
    for path, content in locks.items():
        path.write_bytes(content)
    return scratch.path


def test_only_what_a_killed_one_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch_folder(tmp_path / "d") as kept:
        assert remove_left_over(tmp_path / "d") == []
    left = killed(tmp_path / "d")
    with scratch_folder(tmp_path / "d") as running:
        assert remove_left_over(tmp_path / "d") == [left]
        assert running.path.exists()
    assert list(kept.path.iterdir()) == []

    left = killed(tmp_path / "d")
    here = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: f"not-{here}")
    assert remove_left_over(tmp_path / "d") == []
    assert left.exists()


def test_who_opened_the_lock_before_it_was_given_up_finds_no_host_in_it(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as scratch:
        lock = os.open(scratch.path / ".lock", os.O_RDWR)
    assert os.read(lock, 1024) == b""
    os.close(lock)


def test_a_lock_that_a_child_inherited_counts(tmp_path: Path) -> None:
    left = killed(tmp_path)
    with scratch_folder(tmp_path) as scratch:
        inherited = os.dup(scratch.held[0])
        content = (scratch.path / ".lock").read_bytes()
        (scratch.path / ".lock").rename(scratch.path / "kept")
    (scratch.path / "kept").write_bytes(content)
    (scratch.path / "kept").rename(scratch.path / ".lock")
    assert content == socket.gethostname().encode()
    assert remove_left_over(tmp_path) == [left]
    os.close(inherited)
    assert remove_left_over(tmp_path) == [scratch.path]
