"""The process that ends whatever is below it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake_torchrun

OVERLOOKING = """
import sys, psutil
from muon_offload_cli.launch import leash
every, calls = psutil.Process.children, []
def children(self, recursive=False):
    calls.append(self)
    return every(self, recursive) if len(calls) > 4 else []
psutil.Process.children = children
sys.exit(leash.main(sys.argv[1:]))
"""
"""Lists of processes are empty at first, as one is that was made while a parent ended."""


def test_a_process_that_a_list_of_processes_overlooks_is_ended_all_the_same(tmp_path: Path) -> None:
    orphan = f"sleep 600 > {tmp_path}/log 2>&1 &"
    command = [sys.executable, "-c", OVERLOOKING, "0.3", "bash", "-c", f"{orphan} exit 7"]
    with subprocess.Popen(command, env=fake_torchrun.environment({}), stdin=subprocess.PIPE) as leash:
        assert leash.wait(fake_torchrun.HANG_S) == 7
    assert fake_torchrun.processes_of(tmp_path) == []
