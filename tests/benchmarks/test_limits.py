from __future__ import annotations

import os
import signal
from pathlib import Path

import limits
import pytest
from limits import disk_of, drive_limits, hierarchy, memory_limits, steady_drive

V1_MOUNTS = """\
35 22 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
36 22 0:31 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio
37 22 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "35 22 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def drives(tmp_path: Path) -> Path:
    """A machine with a disk, its second partition and a mapped volume, as sysfs shows them."""
    devices = {
        "259:0": "devices/pci0/block/nvme0n1",
        "259:2": "devices/pci0/block/nvme0n1/nvme0n1p2",
        "253:1": "devices/virtual/block/dm-1",
    }
    _write(tmp_path, {f"sys/{folder}/dev": f"{number}\n" for number, folder in devices.items()})
    _write(tmp_path, {f"sys/{devices['259:2']}/partition": "2\n"})
    links = tmp_path / "sys/dev/block"
    links.mkdir(parents=True)
    for number, folder in devices.items():
        (links / number).symlink_to(Path("../..") / folder)
    return tmp_path


@pytest.mark.parametrize(
    ("major", "minor", "disk"),
    [(259, 0, "259:0"), (259, 2, "259:0"), (253, 1, "253:1"), (0, 52, None)],
    ids=["a disk", "a partition", "a mapped volume", "no block device"],
)
def test_limits_go_to_the_whole_disk(drives: Path, major: int, minor: int, disk: str | None) -> None:
    assert disk_of(os.makedev(major, minor), drives) == disk


def test_a_filesystem_without_a_drive_is_refused() -> None:
    with (
        pytest.raises(SystemExit, match=r"--drive-mb-s: /proc \(proc\) has no one block device below it"),
        steady_drive(Path("/proc"), 40),
    ):
        pass


def test_groups_go_also_where_the_process_can_move_into_none_and_back_into_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(option: str, file: Path, text: str) -> None:
        if file.name == "cgroup.procs":
            raise SystemExit(f"{option}: {file}")

    monkeypatch.setattr(limits, "hierarchy", lambda option: (2, [tmp_path]))
    monkeypatch.setattr(limits, "disk_of", lambda device: "259:0")
    monkeypatch.setattr(limits, "_write", refuse)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit), steady_drive(tmp_path, 40):
        pass
    assert list(tmp_path.iterdir()) == []


def test_without_a_limit_no_group_is_made() -> None:
    with steady_drive(Path("/proc"), None) as group:
        assert group is None


def test_each_version_is_told_the_limit_in_its_own_words() -> None:
    assert drive_limits(2, "259:0", 40_000_000) == {"io.max": "259:0 rbps=40000000 wbps=40000000"}
    assert drive_limits(1, "259:0", 40_000_000) == {
        "blkio.throttle.read_bps_device": "259:0 40000000",
        "blkio.throttle.write_bps_device": "259:0 40000000",
    }
    assert memory_limits(2, 4096) == {"memory.max": "4096", "memory.swap.max": "0"}
    # The kernel refuses a limit with swap that is below the one without.
    assert list(memory_limits(1, 4096)) == ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]


def test_version_1_has_the_controller_where_both_versions_are_mounted(tmp_path: Path) -> None:
    groups = {"proc/self/cgroup": "3:blkio:/job\n1:memory:/\n0::/\n", "proc/self/mountinfo": V1_MOUNTS}
    root = _write(tmp_path, {**groups, "sys/fs/cgroup/blkio/job/cgroup.procs": ""})
    blkio = root / "sys/fs/cgroup/blkio"
    assert hierarchy("--drive-mb-s", root) == (1, [blkio / "job", blkio])


def test_version_2_needs_the_io_controller(tmp_path: Path) -> None:
    controllers = "sys/fs/cgroup/cgroup.controllers"
    groups = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNTS}
    root = _write(tmp_path, {**groups, controllers: "cpu io memory\n"})
    assert hierarchy("--drive-mb-s", root) == (2, [root / "sys/fs/cgroup"])
    _write(root, {controllers: "cpu memory\n"})
    with pytest.raises(SystemExit, match="no control group here has the controller io"):
        hierarchy("--drive-mb-s", root)
