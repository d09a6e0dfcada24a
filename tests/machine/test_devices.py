from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muon_offload_cli.machine.devices import gpu_count, gpu_memory_bytes


@pytest.fixture
def four(tmp_path: Path) -> Path:
    device_files = tmp_path / "dev"
    device_files.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia0x", "null"):
        (device_files / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("1,3", 2),
        ("0,-1,2", 1),
        ("0,9,1", 1),
        ("GPU-aa,GPU-bb", 2),
        ("MIG-aa,MIG-bb,MIG-cc,MIG-dd,MIG-ee", 5),
        ("none", 0),
    ],
)
def test_visible_devices_count_as_cuda_counts_them(four: Path, visible: str | None, count: int) -> None:
    environment = {"PATH": ""} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert gpu_count(environment, root=four) == count


def test_without_device_files_nvidia_smi_is_asked(tmp_path: Path) -> None:
    _program(tmp_path, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'; echo '  MIG 1g'; echo 'GPU 1: NVIDIA H200'")
    assert gpu_count({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, root=tmp_path) == 2


def test_a_broken_nvidia_smi_means_no_gpu(tmp_path: Path) -> None:
    _program(tmp_path, "echo 'GPU 0: ghost'; exit 9")
    assert gpu_count({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, root=tmp_path) == 0
    assert gpu_count({"PATH": ""}, root=tmp_path) == 0


def test_the_smallest_gpu_counts_and_an_unknown_one_is_none(tmp_path: Path) -> None:
    _program(tmp_path, "echo 143771; echo 81559")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert gpu_memory_bytes(environment) == 81559 * 2**20
    _program(tmp_path, "echo '[N/A]'")
    assert gpu_memory_bytes(environment) is None
    assert gpu_memory_bytes({"PATH": ""}) is None


def test_machine_facts_need_no_torch() -> None:
    names = ("filesystem", "memory", "cgroup", "devices", "limits", "mounts", "anonymous_file")
    code = ";".join(f"import muon_offload_cli.machine.{name}" for name in names)
    code += ";import sys;print(sorted({'torch','numpy','megatron'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def _program(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
