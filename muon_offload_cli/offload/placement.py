"""Keeping a rank's staging memory and I/O threads on the memory node of its GPU, without libnuma.

Linux puts a page where the thread runs that touches it first, and a new thread runs where its parent may:
whoever makes buffers and threads while it is bound to the node's CPUs has them there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch

from muon_offload_cli.machine.numa import NearDevice, near_device


def near(device: torch.device) -> NearDevice:
    """Find the CPUs near the training device; none in particular for a CPU device."""
    if device.type != "cuda":
        return NearDevice()
    properties: Any = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return near_device(address, os.sched_getaffinity(0))


@contextmanager
def bound_to(cpus: Set[int]) -> Iterator[None]:
    """Let the calling thread, and threads that it starts meanwhile, run on `cpus` alone; empty: anywhere.

    The caller runs where it did before afterwards; threads that were started stay, and so do theirs.
    """
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
