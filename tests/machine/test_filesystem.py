from __future__ import annotations

import os
from pathlib import Path

import pytest

from muon_offload_cli.machine.filesystem import inspect, supports_direct_io
from muon_offload_cli.machine.mounts import mount_of, read_mounts
from tests.fakes.drive import directory_on_a_drive

MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw - proc proc rw
30 22 0:30 / /mnt/nvme\\0400 rw - xfs /dev/nvme0n1 rw
31 22 0:31 / /mnt rw - nfs4 server:/home rw
32 22 0:32 /data /mnt/data rw,noatime - btrfs /dev/sdb rw,compress=zstd
33 31 0:33 / /mnt rw - lustre fs rw
broken line
"""


@pytest.fixture
def mountinfo(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTINFO)
    return path


def test_mounts_are_read_with_escapes_and_broken_lines_skipped(mountinfo: Path) -> None:
    mounts = read_mounts(mountinfo)
    assert [entry.mount_point for entry in mounts] == [
        "/",
        "/proc",
        "/mnt/nvme 0",
        "/mnt",
        "/mnt/data",
        "/mnt",
    ]
    assert mounts[4].root == "/data"
    assert {"noatime", "compress=zstd"} <= mounts[4].options


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/x", "ext4"),
        ("/mnt/nvme 0/x", "xfs"),
        ("/mnt/nvme 00", "lustre"),
        ("/mnt/data", "btrfs"),
        ("/mnt/database", "lustre"),
        ("/mnt/other", "lustre"),
    ],
)
def test_a_path_belongs_to_its_longest_and_newest_mount(mountinfo: Path, path: str, kind: str) -> None:
    entry = mount_of(Path(path), read_mounts(mountinfo))
    assert entry is not None
    assert entry.kind == kind


def test_no_mount_table_means_no_mount() -> None:
    assert mount_of(Path("/x"), []) is None


def test_a_directory_that_does_not_exist_yet_has_its_parents_facts(tmp_path: Path) -> None:
    there, not_there = inspect(tmp_path), inspect(tmp_path / "not" / "yet")
    assert not_there.directory == tmp_path / "not" / "yet"
    assert (not_there.mount_point, not_there.kind) == (there.mount_point, there.kind)
    assert not_there.total_bytes == there.total_bytes > 0
    assert 0 < there.free_bytes <= there.total_bytes
    assert there.writable
    assert not_there.writable
    assert not (tmp_path / "not").exists()


def test_symlinks_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert inspect(tmp_path / "link" / "x").directory == tmp_path / "real" / "x"


def test_nothing_can_be_created_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not inspect(tmp_path / "file" / "x").writable


def test_memory_and_network_filesystems_are_recognized(mountinfo: Path) -> None:
    assert inspect(Path("/mnt"), mounts=read_mounts(mountinfo)).is_network
    mountinfo.write_text(MOUNTINFO.replace("- lustre", "- fuse.mount-s3"))
    assert inspect(Path("/mnt"), mounts=read_mounts(mountinfo)).is_network
    if not Path("/dev/shm").is_mount():
        pytest.skip("/dev/shm is no mount here")
    assert inspect(Path("/dev/shm")).is_memory


def test_an_unknown_mount_is_said_to_be_unknown(tmp_path: Path) -> None:
    mount = inspect(tmp_path, mounts=[])
    assert (mount.kind, mount.mount_point, mount.is_memory, mount.is_network) == ("unknown", "", False, False)


def test_the_direct_io_probe_leaves_nothing_and_answers_no_where_nothing_can_be_written(
    tmp_path: Path,
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert supports_direct_io(directory_on_a_drive(tmp_path)) in (True, False)
    assert not supports_direct_io(tmp_path / "missing")
    assert not supports_direct_io(Path("/proc"))
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_direct_io_probe_agrees_with_an_open(tmp_path: Path) -> None:
    directory = directory_on_a_drive(tmp_path)
    try:
        os.close(os.open(directory / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip(f"{directory} takes no O_DIRECT")
    assert supports_direct_io(directory)
