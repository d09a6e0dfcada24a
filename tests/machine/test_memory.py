from __future__ import annotations

from pathlib import Path

import pytest

from muon_offload_cli.machine.cgroup import memory_groups
from muon_offload_cli.machine.memory import inspect, oom_kills, peak_of_cgroup
from muon_offload_cli.units import GIB

MEMINFO = """\
MemTotal: 104857600 kB
MemAvailable: 83886080 kB
SwapTotal: 1024 kB
SwapFree: 512 kB
HugePages_Total: 0
"""
V2_MOUNT = "35 22 0:30 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 22 0:30 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
UNLIMITED_V1 = "9223372036854771712"


def _machine(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    everything = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mountinfo,
        **files,
    }
    for name, text in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_machines_figures_count(tmp_path: Path) -> None:
    memory = inspect(_machine(tmp_path, "", "", {}))
    assert memory.total_bytes == 100 * GIB
    assert memory.available_bytes == memory.headroom_bytes == 80 * GIB
    assert memory.used_bytes == 20 * GIB
    assert memory.limit_bytes is None
    assert peak_of_cgroup(tmp_path) is None
    assert oom_kills(tmp_path) is None


def test_the_smallest_limit_on_the_way_up_counts_in_version_2(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    files = {
        f"{top}/job/memory.max": f"{16 * GIB}\n",
        f"{top}/job/memory.current": f"{10 * GIB}\n",
        f"{top}/job/memory.stat": f"anon 1\ninactive_file {3 * GIB}\nactive_file {GIB}\n",
        f"{top}/job/step/memory.max": "max\n",
        f"{top}/job/step/memory.current": f"{9 * GIB}\n",
        f"{top}/job/step/memory.peak": f"{12 * GIB}\n",
        f"{top}/job/step/memory.events": "low 0\noom 2\noom_kill 1\n",
    }
    root = _machine(tmp_path, "0::/job/step\n", V2_MOUNT.format(root="/"), files)
    memory = inspect(root)
    assert memory.limit_bytes == 16 * GIB
    assert memory.used_bytes == 10 * GIB
    assert memory.headroom_bytes == 10 * GIB  # 16 less the 6 that cannot be reclaimed
    assert peak_of_cgroup(root) == 12 * GIB
    assert oom_kills(root) == 1


def test_headroom_is_the_least_over_all_levels(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    files = {
        f"{top}/node/memory.max": f"{64 * GIB}\n",
        f"{top}/node/memory.current": f"{62 * GIB}\n",
        f"{top}/node/job/memory.max": f"{16 * GIB}\n",
        f"{top}/node/job/memory.current": f"{GIB}\n",
    }
    memory = inspect(_machine(tmp_path, "0::/node/job\n", V2_MOUNT.format(root="/"), files))
    assert memory.limit_bytes == 16 * GIB
    assert memory.headroom_bytes == 2 * GIB


def test_a_container_whose_path_is_the_hosts_uses_what_it_sees(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    for own in ("0::/docker/abc\n", "0::/../../elsewhere\n", "0::/\n"):
        root = _machine(tmp_path, own, V2_MOUNT.format(root="/"), files)
        assert inspect(root).limit_bytes == 8 * GIB, own
    root = _machine(tmp_path, "0::/docker/abc\n", V2_MOUNT.format(root="/docker/abc"), files)
    assert inspect(root).limit_bytes == 8 * GIB


@pytest.mark.parametrize("hybrid", [False, True], ids=["version 1", "version 1 beside an empty version 2"])
def test_version_1_knows_no_limit_as_a_huge_number(tmp_path: Path, hybrid: bool) -> None:
    top = "sys/fs/cgroup/memory"
    files = {
        f"{top}/memory.limit_in_bytes": UNLIMITED_V1,
        f"{top}/job/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{top}/job/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{top}/job/memory.max_usage_in_bytes": f"{4 * GIB}\n",
        f"{top}/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        f"{top}/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
    }
    mounts = V1_MOUNT.format(root="/")
    if hybrid:
        mounts = "36 22 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n" + mounts
        (tmp_path / "sys/fs/cgroup/unified").mkdir(parents=True)
    root = _machine(tmp_path, "4:cpu,memory:/job\n0::/\n", mounts, files)
    memory = inspect(root)
    assert memory.limit_bytes == 4 * GIB
    assert memory.headroom_bytes == 3 * GIB
    assert peak_of_cgroup(root) == 4 * GIB
    assert oom_kills(root) == 3


def test_a_limit_above_the_machines_memory_is_none(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{200 * GIB}", "sys/fs/cgroup/memory.current": f"{150 * GIB}"}
    memory = inspect(_machine(tmp_path, "0::/\n", V2_MOUNT.format(root="/"), files))
    assert memory.limit_bytes is None
    assert memory.headroom_bytes == 80 * GIB


def test_this_machine_has_memory() -> None:
    memory = inspect()
    assert 0 < memory.headroom_bytes <= memory.total_bytes
    assert all(group.directory.is_dir() for group in memory_groups())
