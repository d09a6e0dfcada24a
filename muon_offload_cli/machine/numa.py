"""Which memory node (NUMA) a GPU hangs on, and which CPUs are near it, as sysfs tells.

Files and meanings: Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-bus-pci of the Linux kernel.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

_NODES = "sys/devices/system/node"


@dataclass(frozen=True, kw_only=True, slots=True)
class NearDevice:
    """The CPUs of a device's memory node.

    Attributes:
        cpus: CPUs that a thread should run on; empty: any, because there is one node or it is not known.
        note: What a person should see; empty if there is nothing to say.
    """

    cpus: frozenset[int] = frozenset()
    note: str = ""


def near_device(pci_address: str, allowed: Set[int], root: Path = Path("/")) -> NearDevice:
    """Find the CPUs near a PCI device.

    Args:
        pci_address: As sysfs writes it, ``0000:41:00.0``.
        allowed: CPUs that this process may run on.
        root: Where ``sys`` is looked for.
    """
    # Nodes without CPUs are memory of other kinds: GPUs' own on some machines, CXL.
    nodes = _parse_list(_read(root / _NODES / "has_cpu") or _read(root / _NODES / "online"))
    if len(nodes) < 2:
        return NearDevice()
    text = _read(root / "sys/bus/pci/devices" / pci_address / "numa_node")
    if not text.isdecimal() or int(text) not in nodes:
        # -1 where firmware does not say it, as in most virtual machines.
        return NearDevice(note=_unknown(pci_address, len(nodes), f"numa_node is {text or 'not there'}"))
    cpus = _parse_list(_read(root / _NODES / f"node{text}" / "cpulist")) & allowed
    if not cpus:
        reason = f"this process may run on none of the CPUs of node {text}"
        return NearDevice(note=_unknown(pci_address, len(nodes), reason))
    return NearDevice(cpus=frozenset(cpus))


def _unknown(pci_address: str, count: int, reason: str) -> str:
    return (
        f"staging memory and I/O threads are not placed near GPU {pci_address}: this machine has {count} "
        f"memory nodes, and {reason}"
    )


def _parse_list(text: str) -> Set[int]:
    """Read ``0-3,8,10-11``; empty for anything else."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
