"""What ``doctor`` says of a machine: a finding a row, each fine, worth a warning, or broken. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.config.probing import ProbeReport
from muon_offload_cli.config.rules.facts import DirectoryFacts
from muon_offload_cli.errors import command
from muon_offload_cli.machine.limits import ProcessLimits, judge_limits
from muon_offload_cli.machine.memory import HostMemory
from muon_offload_cli.units import GIB, format_bytes

# Four ranks of the smallest shipped recipe, with torch loaded in each.
LITTLE_MEMORY_BYTES = 8 * GIB
LITTLE_SPACE_BYTES = GIB
OLDEST_PYTHON = (3, 12)


class State(enum.StrEnum):
    """How a finding is."""

    FINE = "fine"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row.

    Attributes:
        name: What was looked at.
        found: What is there.
        state: How it is.
        fix: What to do, empty if it is fine.
    """

    name: str
    found: str
    state: State = State.FINE
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Everything that is judged.

    Attributes:
        python: Version of the interpreter, major and minor first.
        executable: Its path.
        report: What the probe of Megatron said.
        gpus: GPUs that a process started now would see, without torch's help.
        memory: Host memory; None if it cannot be read.
        cgroup_version: Version (1 or 2) of the control group that limits memory; None: there is none.
        limits: Limits of a process.
        scratch: Candidate folders for state.
    """

    python: tuple[int, ...]
    executable: str
    report: ProbeReport
    gpus: int
    memory: HostMemory | None
    cgroup_version: int | None
    limits: ProcessLimits
    scratch: Sequence[DirectoryFacts]


def diagnose(machine: Machine) -> list[Finding]:
    """Judge a machine; rows in the order in which they are shown."""
    return [
        _python(machine),
        *_software(machine.report),
        _gpus(machine),
        *_memory(machine),
        *_limits(machine),
        *_scratch(machine.scratch),
    ]


def _python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python[:3]))
    old = machine.python[:2] < OLDEST_PYTHON
    return Finding(
        name="Python",
        found=f"{version} ({machine.executable})",
        state=State.BROKEN if old else State.FINE,
        fix="install Python 3.12 or newer" if old else "",
    )


def _software(report: ProbeReport) -> Iterator[Finding]:
    for problem in report.problems:
        yield Finding(name="Megatron", found=problem.what, state=State.BROKEN, fix=problem.fix)
    software = report.megatron
    if software is not None:
        cuda = f"CUDA {software.torch_cuda}" if software.torch_cuda else "built without CUDA"
        yield Finding(name="torch", found=f"{software.torch_version or 'unknown'}, {cuda}")
        if software.version is not None:
            yield Finding(name="Megatron", found=str(software))
            if software.offloader_lacks:
                yield Finding(
                    name="its offloader",
                    found=f"has changed: it lacks {'; '.join(software.offloader_lacks)}",
                    state=State.WARNING,
                    fix="use offload.engine=disk or host there: mapped extends that offloader",
                )
    for problem in report.muon_problems:
        yield Finding(name="Muon", found=problem.what, state=State.BROKEN, fix=problem.fix)
    if software is not None and software.newton_schulz:
        types = ", ".join(name for name, steps in software.newton_schulz.items() if steps)
        found = f"{software.optimizers_version or 'unknown version'}; coefficients {types}"
        if software.adaptive_muon:
            found += "; adaptive Muon cannot be stepped"
        yield Finding(name="emerging-optimizers", found=found)


def _gpus(machine: Machine) -> Finding:
    seen = machine.report.num_gpus if machine.report.cuda_available else 0
    if machine.gpus and seen is not None and seen < machine.gpus:
        return Finding(
            name="GPUs",
            found=f"{machine.gpus} present, torch sees {seen}",
            state=State.BROKEN,
            fix="install a torch build for the CUDA version that nvidia-smi shows",
        )
    if not machine.gpus:
        return Finding(
            name="GPUs",
            found="none: runs rehearse on CPUs",
            state=State.WARNING,
            fix="train on a machine with NVIDIA GPUs",
        )
    return Finding(name="GPUs", found=str(machine.gpus))


def _memory(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory
    if memory is None:
        yield Finding(
            name="host memory", found="/proc/meminfo cannot be read", state=State.WARNING, fix="mount /proc"
        )
        return
    little = memory.headroom_bytes < LITTLE_MEMORY_BYTES
    yield Finding(
        name="host memory",
        found=f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} available, "
        f"{format_bytes(memory.headroom_bytes)} of it for this process",
        state=State.WARNING if little else State.FINE,
        fix="end other programs or raise the memory limit" if little else "",
    )
    group = f"cgroup v{machine.cgroup_version}" if machine.cgroup_version else "no cgroup"
    if memory.limit_bytes is None:
        yield Finding(name="memory limit", found=f"none ({group})")
    else:
        used = f"{format_bytes(memory.used_bytes)} used"
        yield Finding(name="memory limit", found=f"{format_bytes(memory.limit_bytes)}, {used} ({group})")


def _limits(machine: Machine) -> Iterator[Finding]:
    for limit in judge_limits(machine.limits):
        state = State.BROKEN if limit.stops else State.WARNING if limit.fix else State.FINE
        yield Finding(name=limit.name, found=limit.found, state=state, fix=limit.fix)


def _scratch(candidates: Sequence[DirectoryFacts]) -> Iterator[Finding]:
    if all(_scratch_state(known)[0] is State.BROKEN for known in candidates):
        yield Finding(
            name="scratch",
            found="no drive that can be written",
            state=State.BROKEN,
            fix="mount a local drive, and set SCRATCH or offload.directory to a folder on it",
        )
    for known in candidates:
        state, fix = _scratch_state(known)
        free = "" if known.free_bytes is None else f", {format_bytes(known.free_bytes)} free"
        direct = {True: ", O_DIRECT", False: ", no O_DIRECT", None: ""}[known.direct_io]
        yield Finding(
            name=f"scratch {known.path}",
            found=f"{known.kind} on {known.mount_point}{free}{direct}",
            # One unusable folder is no fault of the machine while there is another.
            state=State.WARNING if state is State.BROKEN else state,
            fix=fix,
        )


def _scratch_state(known: DirectoryFacts) -> tuple[State, str]:
    if known.is_memory:
        return State.BROKEN, "use a folder on a drive: this one is memory"
    if not known.writable:
        return State.BROKEN, "make it writable: sudo install -d -o $USER " + command(known.path)
    if known.write_error:
        return State.BROKEN, f"use another folder: {known.write_error}"
    if known.free_bytes is not None and known.free_bytes < LITTLE_SPACE_BYTES:
        return State.WARNING, "free some space"
    if known.is_network:
        return State.WARNING, "use a folder on a local drive: this one is reached over a network or FUSE"
    if known.direct_io is False:
        return State.WARNING, "use another filesystem: buffered I/O takes memory and copies"
    if known.kind == "overlay":
        return State.WARNING, "mount a volume: a container's overlay is slower"
    return State.FINE, ""


def scratch_paths(environment_scratch: str, default: Path | None, mount_points: Sequence[str]) -> list[Path]:
    """Return candidate folders for state, the likeliest first, each filesystem once.

    Args:
        environment_scratch: Value of SCRATCH.
        default: Folder that runs take if nothing is said; None if there is none.
        mount_points: Mounted drives.
    """
    named = [Path(environment_scratch)] if environment_scratch.startswith("/") else []
    named += [default] if default is not None else []
    return list(dict.fromkeys([*named, *map(Path, mount_points)]))
