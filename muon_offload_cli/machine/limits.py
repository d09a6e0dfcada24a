"""Limits that a shell, a scheduler or the kernel puts on each process, and which of them stop a rank."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.units import GIB, format_bytes

# A common default is 1024, and a rank's sockets of all process groups, data files and logs add up.
ENOUGH_OPEN_FILES = 4096
COMMON_OPEN_FILES = 1024
# Four CPU ranks of the smallest recipe fail with 128 and train with 192.
FEWEST_OPEN_FILES = 192
# The kernel's default (Documentation/admin-guide/sysctl/vm.rst).
ENOUGH_MAPS = 65530
# A CPU rank of the smallest recipe takes 5.96 GiB, nearly all of it libraries and stacks of threads.
LEAST_ADDRESS_BYTES = 6 * GIB
LEAST_FILE_BYTES = GIB
FILE_SIZE = "file size"
UNLIMITED_FILES = "ulimit -f unlimited"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """Limits that a process started now would inherit; None: no limit.

    Attributes:
        open_files: Descriptors (``ulimit -n``).
        file_bytes: Size of one file (``ulimit -f``).
        address_bytes: Addresses, used or not (``ulimit -v``).
        locked_bytes: Memory that a user may lock (``ulimit -l``); CUDA's pinning is not bound by it.
        max_maps: Mappings (``vm.max_map_count``); None also where that cannot be read.
    """

    open_files: int | None = None
    file_bytes: int | None = None
    address_bytes: int | None = None
    locked_bytes: int | None = None
    max_maps: int | None = None


NO_LIMITS = ProcessLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitFinding:
    """One limit, judged.

    Attributes:
        name: What is limited.
        found: The limit.
        fix: Command that lifts it; empty if it is fine.
        stops: No rank can train under it; of file sizes, none of a model worth offloading.
    """

    name: str
    found: str
    fix: str = ""
    stops: bool = False


def rank_limits(root: Path = Path("/")) -> ProcessLimits:
    """Return the limits of this process that its ranks will inherit.

    Args:
        root: Where ``proc`` is looked for.
    """
    return ProcessLimits(
        open_files=_limit(resource.RLIMIT_NOFILE),
        file_bytes=_limit(resource.RLIMIT_FSIZE),
        address_bytes=_limit(resource.RLIMIT_AS),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        max_maps=_max_map_count(root),
    )


def judge_limits(limits: ProcessLimits, *, enough_files: int = ENOUGH_OPEN_FILES) -> list[LimitFinding]:
    """Judge every limit, without knowing the run.

    Args:
        limits: What a rank would inherit.
        enough_files: Open files below which it is worth a word.
    """
    files, maps, address = limits.open_files, limits.max_maps, limits.address_bytes
    size, locked = limits.file_bytes, limits.locked_bytes
    few = files is not None and files < enough_files
    return [
        LimitFinding(
            name="open files",
            found="no limit" if files is None else str(files),
            fix=f"ulimit -n {ENOUGH_OPEN_FILES}" if few else "",
            stops=files is not None and files < FEWEST_OPEN_FILES,
        ),
        LimitFinding(
            name="max_map_count",
            found="not known" if maps is None else str(maps),
            fix=f"sudo sysctl vm.max_map_count={ENOUGH_MAPS}"
            if maps is not None and maps < ENOUGH_MAPS
            else "",
        ),
        LimitFinding(
            name="address space",
            found="no limit" if address is None else format_bytes(address),
            fix="" if address is None else "ulimit -v unlimited",
            stops=address is not None and address < LEAST_ADDRESS_BYTES,
        ),
        # CUDA pins through its driver, which this limit does not bind.
        LimitFinding(name="memlock", found="no limit" if locked is None else format_bytes(locked)),
        LimitFinding(
            name=FILE_SIZE,
            found="no limit" if size is None else format_bytes(size),
            fix="" if size is None else UNLIMITED_FILES,
            stops=size is not None and size < LEAST_FILE_BYTES,
        ),
    ]


def _max_map_count(root: Path) -> int | None:
    try:
        text = (root / "proc/sys/vm/max_map_count").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
