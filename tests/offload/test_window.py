"""Handing a window over from one chunk to the next."""

from __future__ import annotations

import sys
import threading

import pytest

from muon_offload_cli.offload.plan import ParameterSpec, plan_chunks
from muon_offload_cli.offload.window import Window, make_windows
from tests.fakes.fake_torchrun import HANG_S
from tests.offload.rig import CPU


class Waiting:
    """A thread that waits for a part of a window."""

    def __init__(self, window: Window, turn: int, end: int) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, args=(window, turn, end), daemon=True)
        self._thread.start()

    def _wait(self, window: Window, turn: int, end: int) -> None:
        try:
            window.wait_empty(turn, end)
        except RuntimeError as error:
            self.error = error

    def ends(self, within: float = HANG_S) -> bool:
        self._thread.join(within)
        return not self._thread.is_alive()


def test_the_first_turn_finds_the_window_empty() -> None:
    window = Window(100, CPU)
    assert window.wait_empty(window.next_turn(), 100) is None


def test_a_turn_waits_for_just_the_bytes_it_overwrites() -> None:
    window = Window(100, CPU)
    first, second = window.next_turn(), window.next_turn()
    small, whole = Waiting(window, second, 40), Waiting(window, second, 100)
    assert not small.ends(within=0.05)
    window.empty_up_to(first, 40, None)
    assert small.ends()
    assert not whole.ends(within=0.05)
    window.empty_up_to(first, 100, None)
    assert whole.ends()
    assert small.error is whole.error is None


def test_turns_that_were_forgotten_do_not_disturb_later_ones() -> None:
    window = Window(10, CPU)
    for turn in range(50):
        assert window.next_turn() == turn
        window.wait_empty(turn, 10)
        window.forget_before(turn)
        window.empty_up_to(turn, 10, None)
    assert len(window._emptied) <= 2


def test_a_failed_window_wakes_who_waits_and_refuses_who_comes_later() -> None:
    window = Window(10, CPU)
    window.next_turn()
    waiting = Waiting(window, window.next_turn(), 10)
    window.fail()
    assert waiting.ends()
    assert isinstance(waiting.error, RuntimeError)
    with pytest.raises(RuntimeError, match="failed"):
        window.wait_empty(0, 10)


def test_each_window_is_as_large_as_its_own_largest_chunk() -> None:
    sizes = [1024, 8192, 1024, 2048, 1024, 1024]
    parameters = [ParameterSpec(shape=(size,)) for size in sizes]
    chunks = plan_chunks(parameters, chunk_bytes=1, fraction=1.0, host_bytes=0, disk=True, windows=2).chunks
    assert [chunk.nbytes for chunk in chunks] == [8 * size for size in sizes]
    assert [w.memory.numel() for w in make_windows(chunks, 2, CPU)] == [8 * 1024, 8 * 8192]
    assert [w.memory.numel() for w in make_windows(chunks, 3, CPU)] == [8 * 2048, 8 * 8192, 8 * 1024]


def test_there_are_no_more_windows_than_chunks() -> None:
    parameters = [ParameterSpec(shape=(1024,))] * 2
    chunks = plan_chunks(parameters, chunk_bytes=1, fraction=1.0, host_bytes=0, disk=True, windows=2).chunks
    assert len(make_windows(chunks, 5, CPU)) == 2
    assert make_windows([], 3, CPU) == []


def test_turns_are_handed_out_while_others_are_forgotten() -> None:
    window = Window(8, CPU)
    stop = threading.Event()
    errors: list[BaseException] = []

    def forget() -> None:
        try:
            while not stop.is_set():
                window.forget_before(10**9)
        except RuntimeError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=forget)
    thread.start()
    try:
        for _ in range(20_000):
            window.next_turn()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
