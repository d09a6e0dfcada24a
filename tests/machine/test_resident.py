"""Peaks of this process's own memory."""

from __future__ import annotations

from muon_offload_cli.machine.resident import resident_growth
from muon_offload_cli.units import MIB


def test_memory_that_came_and_went_is_seen_and_earlier_peaks_are_not() -> None:
    with resident_growth() as large:
        filled = bytearray(b"x") * (192 * MIB)
        del filled
    with resident_growth() as small:
        filled = bytearray(b"x") * (48 * MIB)
        del filled
    assert 190 * MIB < large.nbytes < 240 * MIB
    assert 40 * MIB < small.nbytes < 100 * MIB
