"""Filesystems that could hold state, and measurements that are kept."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from muon_offload_cli.machine.drives import DriveRecord, local_mounts, recall, records_file, remember


def record(mount_point: str, read: float, host: str = "") -> DriveRecord:
    return DriveRecord(
        host=host or socket.gethostname(),
        mount_point=mount_point,
        read=read,
        written=1.0,
        request_bytes=8,
        threads=8,
        measured="2026-01-01T00:00:00+00:00",
    )


def test_the_last_measurement_of_a_filesystem_of_this_machine_is_recalled(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "drives.json"
    for kept in (
        record("/a", 1.0),
        record("/a", 2.0),
        record("/a", 3.0, host="elsewhere"),
        record("/b", 4.0),
    ):
        assert remember(kept, file) == file
    assert recall("/a", file) == record("/a", 2.0)
    assert recall("/b", file) == record("/b", 4.0)
    assert recall("/c", file) is None


@pytest.mark.parametrize("damage", ["", "{", "[1]", '[{"host": 1}]'])
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "drives.json"
    file.write_text(damage)
    assert recall("/a", file) is None
    remember(record("/a", 1.0), file)
    assert recall("/a", file) == record("/a", 1.0)


def test_measurements_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert records_file() == tmp_path / "muon-offload" / "drives.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert records_file() == tmp_path / ".cache" / "muon-offload" / "drives.json"


def test_mounts_that_could_hold_state_are_writable_folders_on_drives() -> None:
    for mount in local_mounts():
        assert mount.writable
        assert mount.existing.is_dir()
        assert not mount.is_memory
        assert not mount.is_network
