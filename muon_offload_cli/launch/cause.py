"""What usually ends a rank in such a way, told from its signal, its words and the machine's figures. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from muon_offload_cli.launch.torchrun_log import RankExit
from muon_offload_cli.units import format_bytes

_NO_SPACE = re.compile(r"no space left on device|errno 28|ENOSPC", re.IGNORECASE)
_READ_ONLY = re.compile(r"read-only file system|errno 30|EROFS", re.IGNORECASE)
_BAD_DRIVE = re.compile(r"StoreError.*\bEIO\b")
_GPU_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFigures:
    """What the machine says at the time of death; None: not known.

    Attributes:
        oom_kills: Kills by the kernel's out-of-memory killer in this control group during the run.
        memory_limit_bytes: Limit of the control group.
        memory_peak_bytes: Its highest use.
        disk_directory: Where the run keeps its state; of several, the one with least free.
        disk_free_bytes: Free bytes there now.
    """

    oom_kills: int | None = None
    memory_limit_bytes: int | None = None
    memory_peak_bytes: int | None = None
    disk_directory: str = ""
    disk_free_bytes: int | None = None


def likely_cause(seen: RankExit | None, words: str, machine: MachineFigures) -> str:
    """Return what usually makes a rank end so, and what to do about it; empty if it is not known.

    Args:
        seen: How it ended, as torchrun saw it.
        words: Its error and its last lines.
        machine: Figures at the time of death.
    """
    name = seen.signal_name if seen else ""
    if name == "SIGKILL":
        return _killed(machine)
    if name == "SIGBUS":
        return (
            "a file mapping outgrew its filesystem: it is full, or it is a small /dev/shm"
            f"{_free(machine)}. Free space, or set offload.directory to a larger drive."
        )
    if name == "SIGSEGV":
        return "a crash in native code (a driver, NCCL or an extension); dmesg may say where."
    if name == "SIGABRT":
        return "native code gave up (NCCL's watchdog, or an allocator); the last lines say which."
    if _GPU_MEMORY.search(words):
        return (
            "the GPU's memory is full: smaller train.micro_batch, larger parallel sizes, "
            "or smaller offload.chunk_mb."
        )
    if _NO_SPACE.search(words):
        return (
            f"a filesystem is full{_free(machine)}. Free space, or set offload.directory to a larger drive."
        )
    if _READ_ONLY.search(words):
        return (
            "a filesystem became read-only, as the kernel makes it after errors of its drive: dmesg says "
            "which. Set offload.directory to another drive."
        )
    if _BAD_DRIVE.search(words):
        return "the drive reports errors: dmesg says which. Set offload.directory to another drive."
    return ""


def _killed(machine: MachineFigures) -> str:
    figures = []
    if machine.memory_limit_bytes is not None:
        figures.append(f"limit {format_bytes(machine.memory_limit_bytes)}")
    if machine.memory_peak_bytes is not None:
        figures.append(f"peak {format_bytes(machine.memory_peak_bytes)}")
    shown = f" (memory {', '.join(figures)})" if figures else ""
    fix = "lower offload.host_memory_gb or train.micro_batch, or give the job more memory."
    if machine.oom_kills:
        return f"the kernel's out-of-memory killer, which struck during this run{shown}: {fix}"
    if machine.oom_kills == 0:
        return (
            f"somebody sent SIGKILL: the scheduler, an administrator or another program{shown}; "
            "the kernel counted no out-of-memory kill in this control group."
        )
    return f"usually the kernel's out-of-memory killer{shown}: {fix}"


def _free(machine: MachineFigures) -> str:
    if machine.disk_free_bytes is None:
        return ""
    return f" ({format_bytes(machine.disk_free_bytes)} free in {machine.disk_directory})"
