from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting

import pytest

from muon_offload_cli.storage.ring import RingClosed, StagingRing
from tests.fakes.stores import FakePinner

PAGE = 4096


def test_slots_are_aligned_and_do_not_overlap() -> None:
    with StagingRing(3, 2 * PAGE, False) as ring:
        slots = [ring.acquire() for _ in range(3)]
        for slot in slots:
            slot.memory[:] = bytes([slot.index + 1]) * ring.slot_bytes
        assert [bytes(slot.memory) for slot in slots] == [
            bytes([slot.index + 1]) * ring.slot_bytes for slot in slots
        ]


def test_the_most_slots_in_use_are_remembered() -> None:
    with StagingRing(4, PAGE, False) as ring:
        for slot in [ring.acquire() for _ in range(3)]:
            ring.release(slot)
        assert ring.high_water == 3


def test_acquire_waits_for_a_release() -> None:
    with StagingRing(1, PAGE, False) as ring, ThreadPoolExecutor(1) as pool:
        slot = ring.acquire()
        waiting = pool.submit(ring.acquire)
        with pytest.raises(StillWaiting):
            waiting.result(timeout=0.05)
        ring.release(slot)
        assert waiting.result(timeout=60) is slot


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_fault_wakes_every_waiter(how: str) -> None:
    ring = StagingRing(1, PAGE, False)
    slot = ring.acquire()
    cause = OSError("drive gone")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ring.acquire) for _ in range(4)]
        with pytest.raises(StillWaiting):
            waiting[0].result(timeout=0.05)
        ring.close() if how == "close" else ring.abort(cause)
        for future in waiting:
            with pytest.raises(RingClosed) as caught:
                future.result(timeout=60)
            assert caught.value.__cause__ is (None if how == "close" else cause)
    with pytest.raises(RingClosed):
        ring.acquire()
    ring.release(slot)
    ring.close()


def test_the_first_cause_of_an_abort_is_the_one_told() -> None:
    with StagingRing(1, PAGE, False) as ring:
        first = OSError("first")
        ring.abort(first)
        ring.abort(OSError("second"))
        with pytest.raises(RingClosed) as caught:
            ring.acquire()
        assert caught.value.__cause__ is first


def test_a_slot_cannot_be_given_back_twice() -> None:
    with StagingRing(2, PAGE, False) as ring:
        slot = ring.acquire()
        ring.release(slot)
        with pytest.raises(ValueError, match="not in use"):
            ring.release(slot)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, PAGE), (1, 0), (1, PAGE + 1), (-1, PAGE)])
def test_figures_that_make_no_ring_are_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="ring"):
        StagingRing(slots, slot_bytes, False)


def test_the_ring_pins_its_bytes_and_no_more() -> None:
    pinner = FakePinner()
    with StagingRing(3, PAGE, True, pinner=pinner) as ring:
        assert list(pinner.registered.values()) == [ring.nbytes] == [3 * PAGE]
    assert pinner.registered == {}
