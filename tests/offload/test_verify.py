"""``verify=full``: bytes that change on the drive stop the run instead of training on."""

from __future__ import annotations

from pathlib import Path

import pytest

from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import StoreError
from tests.fakes.stores import WrappedStore
from tests.offload.rig import make, opening, train


class FlippingStore(WrappedStore):
    """Returns one wrong bit in every read."""

    def _read(self, extent: Extent, target: memoryview) -> None:
        super()._read(extent, target)
        target[extent.nbytes // 2] ^= 4


def read_wrong_bits(directory: Path, verify: str) -> None:
    offloader = make(directory, open_store=opening(FlippingStore), windows=2, verify=verify)
    try:
        train(offloader, 3)
    finally:
        offloader.close()


def test_full_verification_names_chunk_step_and_place(directory: Path) -> None:
    with pytest.raises(StoreError, match=r"other bytes than were written: chunk \d+, .* after step"):
        read_wrong_bits(directory, "full")


def test_without_verification_nothing_is_compared(directory: Path) -> None:
    read_wrong_bits(directory, "off")
