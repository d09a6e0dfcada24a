"""A drive that returns other bytes than were written is found out, with what and where."""

from __future__ import annotations

import pytest

from muon_offload_cli.storage.checksums import SAMPLE_EVERY, Checksums, Verify
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import StoreError

SIZE = 4096


def _flipped(data: bytes) -> bytearray:
    other = bytearray(data)
    other[1234] ^= 1
    return other


@pytest.mark.parametrize(("verify", "found"), [(Verify.OFF, 0), (Verify.SAMPLE, 2), (Verify.FULL, 32)])
def test_flipped_bits_are_found_in_the_extents_that_count(verify: Verify, found: int) -> None:
    sums = Checksums(verify, lambda extent: f"chunk at {extent.offset}")
    data = bytes(range(256)) * (SIZE // 256)
    caught = 0
    for number in range(2 * SAMPLE_EVERY):
        extent = Extent(number * SIZE, SIZE)
        sums.note(extent, memoryview(data))
        sums.compare(extent, memoryview(data), "/nvme/muon")
        try:
            sums.compare(extent, memoryview(_flipped(data)), "/nvme/muon")
        except StoreError as error:
            caught += 1
            assert f"chunk at {extent.offset}" in str(error)
            assert "/nvme/muon" in str(error)
    assert caught == found


def test_what_was_written_from_outside_is_not_compared() -> None:
    sums = Checksums(Verify.FULL, str)
    sums.note(Extent(0, SIZE), memoryview(bytes(SIZE)))
    sums.forget()
    sums.compare(Extent(0, SIZE), memoryview(_flipped(bytes(SIZE))), "/nvme/muon")
