"""What the observer and checkpoints see of Megatron's own chunked offloader, once its buffers are mapped."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from muon_offload_cli.machine.numa import NearDevice
from muon_offload_cli.megatron.state_census import PLAIN_MUON_BYTES
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.storage.store import Store


@dataclass(frozen=True, slots=True)
class _Chunk:
    state_bytes: int


class MuonView:
    """What the observer and checkpoints ask of an offloader, answered for Megatron's own.

    The kernel reads and writes the files as their pages are touched, so no transfer is counted or waited for.
    """

    bytes_read = bytes_written = staging_high_bytes = pinned_bytes = window_bytes = 0
    wait_s = io_busy_s = 0.0
    near = NearDevice()

    def __init__(self, native: Any, settings: OffloadSettings) -> None:
        self._native = native
        self.settings = settings
        self.stores: Mapping[Tier, Store] = {}
        self.plan = SimpleNamespace(
            chunks=[
                _Chunk(sum(parameter.numel() for parameter in chunk.params) * PLAIN_MUON_BYTES)
                for chunk in native.chunks
            ]
        )

    @property
    def sweeps(self) -> int:
        """Steps taken."""
        return int(self._native.sweeps)

    def stored_bytes(self, tier: Tier) -> int:
        """Return the bytes in files; what is not selected is counted by who compares with the plan."""
        return self._native.buffers.nbytes if tier is Tier.DISK else 0

    def drop_cache(self) -> None:
        """Do nothing: pages are the kernel's to keep."""

    def synchronize(self) -> None:
        """Let masters and momenta rest where they lie between steps, and wait for the copies."""
        self._native.offload_for_forward()
        torch.cuda.synchronize()

    def loading(self) -> AbstractContextManager[None]:
        """Change nothing: Megatron's own class shows where its state lies."""
        return nullcontext()
