"""Threads stay on the CPUs that they are kept to, and the training thread goes back to its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from muon_offload_cli.machine.numa import NearDevice
from muon_offload_cli.offload.offloader import StateOffloader
from muon_offload_cli.offload.placement import bound_to, near
from tests.offload.rig import CPU, PARAMETERS, THREAD_NAMES, fill, settings, sweep


def test_every_thread_of_the_offloader_runs_near_the_device_and_no_other_does(directory: Path) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU is near everything")
    one = frozenset({max(before)})
    offloader = StateOffloader(
        PARAMETERS, settings(directory), CPU, near_device=NearDevice(cpus=one, note="")
    )
    try:
        fill(offloader)
        # Pools start their threads when there is work.
        sweep(offloader, 1)
        offloader.synchronize()
        ours = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAMES)]
        kinds = {thread.name.split("_")[0] for thread in ours}
        assert kinds >= {"muon-read", "muon-write", "muon-upload", "muon-download"}
        assert {os.sched_getaffinity(thread.native_id or 0) == one for thread in ours} == {True}
        assert os.sched_getaffinity(0) == before
    finally:
        offloader.close()


def test_the_caller_is_free_again_after_an_error() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyError), bound_to({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
        raise KeyError
    assert os.sched_getaffinity(0) == before


def test_a_cpu_device_is_near_every_cpu() -> None:
    assert near(CPU) == NearDevice()
