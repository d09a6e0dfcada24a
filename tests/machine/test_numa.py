"""Where a GPU hangs, read from made-up sysfs trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from muon_offload_cli.machine.numa import NearDevice, near_device

GPU = "0000:41:00.0"
ALL = frozenset(range(16))


def machine(root: Path, nodes: dict[int, str], gpu: str | None, *, has_cpu: str | None = None) -> Path:
    """Write what the kernel shows of memory nodes with these CPUs, and of the GPU's node."""
    folder = root / "sys/devices/system/node"
    for number, cpus in nodes.items():
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    (folder / "online").write_text(",".join(map(str, nodes)) + "\n")
    if has_cpu is not None:
        (folder / "has_cpu").write_text(f"{has_cpu}\n")
    if gpu is not None:
        device = root / "sys/bus/pci/devices" / GPU
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{gpu}\n")
    return root


def test_threads_belong_on_the_cpus_of_the_gpu_s_node(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, "1", has_cpu="0-1")
    assert near_device(GPU, ALL, root) == NearDevice(cpus=frozenset({4, 5, 6, 7, 12, 13, 14, 15}))


def test_only_cpus_that_the_process_may_use_count(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-7", 1: "8-15"}, "1", has_cpu="0-1")
    assert near_device(GPU, {7, 8, 9}, root).cpus == {8, 9}
    other = near_device(GPU, {0, 1}, root)
    assert not other.cpus
    assert "may run on none of the CPUs of node 1" in other.note


@pytest.mark.parametrize("gpu", ["-1", None, "7", "x"])
def test_a_machine_that_does_not_say_where_the_gpu_is_gets_a_note(tmp_path: Path, gpu: str | None) -> None:
    found = near_device(GPU, ALL, machine(tmp_path, {0: "0-7", 1: "8-15"}, gpu, has_cpu="0-1"))
    assert not found.cpus
    assert GPU in found.note
    assert "2 memory nodes" in found.note


@pytest.mark.parametrize("gpu", ["0", "-1", None])
def test_one_node_needs_no_placing_and_no_note(tmp_path: Path, gpu: str | None) -> None:
    assert near_device(GPU, ALL, machine(tmp_path, {0: "0-15"}, gpu, has_cpu="0")) == NearDevice()


def test_memory_without_cpus_is_no_second_node(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-15", 1: "", 2: ""}, "0", has_cpu="0")
    assert near_device(GPU, ALL, root) == NearDevice()


def test_kernels_that_do_not_list_nodes_with_cpus_list_the_online_ones(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-7", 1: "8-15"}, "0")
    assert near_device(GPU, ALL, root).cpus == set(range(8))


def test_a_machine_without_sysfs_is_left_alone(tmp_path: Path) -> None:
    assert near_device(GPU, ALL, tmp_path) == NearDevice()
