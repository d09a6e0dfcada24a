"""``verify=full``: bytes that change on the drive stop the run instead of training on."""

from __future__ import annotations

from pathlib import Path

import pytest

from muon_offload_cli.offload.offloader import StateOffloader
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import StoreError
from tests.fakes.stores import WrappedStore
from tests.offload.rig import CPU, PARAMETERS, fill, opening, settings, sweep


class FlippingStore(WrappedStore):
    """Returns one wrong bit in every read."""

    def _read(self, extent: Extent, target: memoryview) -> None:
        super()._read(extent, target)
        target[extent.nbytes // 2] ^= 4


def train(directory: Path, verify: str) -> None:
    given = settings(directory, windows=2, verify=verify)
    offloader = StateOffloader(PARAMETERS, given, CPU, open_store=opening(FlippingStore))
    try:
        fill(offloader)
        for number in range(3):
            sweep(offloader, number)
    finally:
        offloader.close()


def test_full_verification_names_chunk_step_and_place(directory: Path) -> None:
    with pytest.raises(StoreError, match=r"other bytes than were written: chunk \d+, .* after step"):
        train(directory, "full")


def test_without_verification_nothing_is_compared(directory: Path) -> None:
    train(directory, "off")
