"""Where the stand-in torchrun lives and how tests start and count its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

STANDIN = Path(__file__).parent / "torchrun_path"
REPOSITORY = Path(__file__).parents[2]
HANG_S = 600.0
"""Longer than anything takes on the busiest machine: what meets this limit hangs."""


def environment(plan: dict[str, Any], **more: str) -> dict[str, str]:
    """Environment in which ``python -m torch.distributed.run`` is the stand-in."""
    path = os.pathsep.join([str(STANDIN), str(REPOSITORY)])
    return os.environ | {"PYTHONPATH": path, "FAKE_PLAN": json.dumps(plan)} | more


def command(root: Path, num_ranks: int) -> list[str]:
    module = "muon_offload_cli.megatron.worker"
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={num_ranks}",
        "-m",
        module,
        "x",
        str(root),
    ]


def processes_of(root: Path) -> list[psutil.Process]:
    """Living processes that name the run's folder, or hold one of its logs open (grandchildren do)."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            names_it = any(str(root) in word for word in process.cmdline())
            links = [str(Path(f"/proc/{process.pid}/fd/{n}").readlink()) for n in (1, 2)]
            if names_it or any(link.startswith(str(root)) for link in links):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def pids_of(root: Path) -> list[int]:
    return [process.pid for process in processes_of(root)]


@contextmanager
def started(arguments: list[str], plan: dict[str, Any], **more: str) -> Iterator[subprocess.Popen[str]]:
    """A program with the stand-in on its path, which does not outlive the block."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        arguments,
        env=environment(plan, **more),
        stdout=pipe,
        stderr=pipe,
        text=True,
        # Whatever the tests were started under.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
