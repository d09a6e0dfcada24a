"""GPUs and process limits of this machine, without importing torch."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.units import MIB

_NVIDIA_SMI_TIMEOUT_S = 10.0

# A common default is 1024, and a rank's sockets of all process groups, data files and logs add up.
ENOUGH_OPEN_FILES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """Limits that a process started now would inherit; None: no limit.

    Attributes:
        open_files: Descriptors (``ulimit -n``).
        file_bytes: Size of one file (``ulimit -f``).
        address_bytes: Addresses of a process (``ulimit -v``), of which torch and CUDA take more than memory.
        locked_bytes: Memory that a user may lock (``ulimit -l``); CUDA's pinning is not bound by it.
        processes: Processes and threads of this user (``ulimit -u``).
    """

    open_files: int | None
    file_bytes: int | None
    address_bytes: int | None
    locked_bytes: int | None
    processes: int | None


def gpu_count(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> int:
    """Return how many NVIDIA GPUs a process started now would see.

    Counts ``/dev/nvidia<N>``, or what ``nvidia-smi -L`` lists where there are no such files, and applies
    CUDA_VISIBLE_DEVICES as CUDA does: the list ends at the first entry that names no GPU.

    Args:
        environment: Variables to use instead of this process's own.
        root: Where ``dev`` is looked for.
    """
    variables = os.environ if environment is None else environment
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    present = _device_files(root) or _listed_by_nvidia_smi(variables)
    return present if visible is None else _visible(visible, present)


def gpu_memory_bytes(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the memory of the smallest GPU of this machine as ``nvidia-smi`` tells it; None: not known."""
    query = ["--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    sizes = re.findall(
        r"^\d+$", _nvidia_smi(os.environ if environment is None else environment, *query), re.M
    )
    return min(map(int, sizes)) * MIB if sizes else None


def rank_limits() -> ProcessLimits:
    """Return the limits of this process that its ranks will inherit."""
    return ProcessLimits(
        open_files=_limit(resource.RLIMIT_NOFILE),
        file_bytes=_limit(resource.RLIMIT_FSIZE),
        address_bytes=_limit(resource.RLIMIT_AS),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        processes=_limit(resource.RLIMIT_NPROC),
    )


def max_map_count(root: Path = Path("/")) -> int | None:
    """Return how many mappings a process may have (``vm.max_map_count``); None if that cannot be read."""
    try:
        text = (root / "proc/sys/vm/max_map_count").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _device_files(root: Path) -> int:
    return sum(1 for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal())


def _listed_by_nvidia_smi(variables: Mapping[str, str]) -> int:
    return len(re.findall(r"^GPU \d+:", _nvidia_smi(variables, "-L"), re.MULTILINE))


def _nvidia_smi(variables: Mapping[str, str], *arguments: str) -> str:
    """Return what ``nvidia-smi`` prints, nothing if it is not there or fails."""
    program = shutil.which("nvidia-smi", path=variables.get("PATH"))
    if program is None:
        return ""
    try:
        answer = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _visible(visible: str, present: int) -> int:
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            count += 1
        elif name.startswith("GPU-") or (name.isdecimal() and int(name) < present):
            count = min(count + 1, present)
        else:
            break
    return count


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
