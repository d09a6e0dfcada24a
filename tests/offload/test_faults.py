"""A drive that fails in the middle of a sweep: the cause reaches the training thread, and nothing hangs."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import Store, StoreError
from muon_offload_cli.storage.striped import StripedStore
from muon_offload_cli.storage.system_calls import SYSTEM
from tests.fakes.fake_torchrun import HANG_S
from tests.fakes.stores import FailingStore, ShortStore, SlowStore, WrappedStore, failing_calls
from tests.offload.rig import (
    Model,
    closed_in_time,
    differences,
    fill,
    make,
    opening,
    our_threads,
    sweep,
    train,
)

SWEEPS = 4
Wrap = Callable[[Store], Store]


def run(directory: Path, wrap: Wrap, *, windows: int = 2, **more: object) -> StoreError | None:
    """Sweep on a thread of its own until an error comes or all sweeps are done; a hang is a failure."""
    offloader = make(directory, open_store=opening(wrap), windows=windows, **more)
    caught: list[BaseException] = []

    def run_to_the_end() -> None:
        try:
            train(offloader, SWEEPS)
            offloader.synchronize()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            caught.append(error)

    thread = threading.Thread(target=run_to_the_end, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), f"the training thread hangs: {our_threads()}"
    try:
        with closed_in_time(offloader):
            pass
    except StoreError as error:
        # A read ahead for a sweep that never comes may fail after the last synchronize.
        caught.append(error)
    if not caught:
        return None
    (error,) = caught
    assert isinstance(error, StoreError), repr(error)
    return error


def num_requests(directory: Path, operation: str) -> int:
    """Requests of a good run, so that a fault can be put into each of them."""
    stores: list[FailingStore] = []

    def wrap(store: Store) -> Store:
        stores.append(FailingStore(store, fail_on="nothing"))
        return stores[0]

    assert run(directory, wrap) is None
    return len(stores[0].reads if operation == "read" else stores[0].writes)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_fault_in_any_request_of_any_sweep_stops_the_training_thread_with_its_cause(
    directory: Path, operation: str
) -> None:
    count = num_requests(directory, operation)
    assert count > 30
    for after in range(0, count - 1, 3):
        error = run(directory, lambda store, n=after: FailingStore(store, fail_on=operation, after=n))  # type: ignore[misc]
        assert error is not None, f"request {after} of {count} failed in silence"
        assert (error.path, error.operation, error.errno) == (str(directory), operation, errno.EIO)
        assert str(directory) in str(error)
        assert "EIO" in str(error)
        assert our_threads() == []
        assert not directory.exists()


def test_a_short_read_in_any_sweep_stops_the_training_thread(directory: Path) -> None:
    count = num_requests(directory, "read")
    for after in range(0, count - 1, 5):
        error = run(directory, lambda store, n=after: ShortStore(store, after=n))  # type: ignore[misc]
        assert error is not None
        assert (error.path, error.operation) == (str(directory), "read")
        assert "the file ends there" in str(error)
        assert our_threads() == []


@pytest.mark.parametrize("windows", [1, 3, 6])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("slots", [1, 4])
def test_faults_reach_the_training_thread_whatever_is_waiting_for_whom(
    directory: Path, operation: str, windows: int, slots: int
) -> None:
    for after in (0, 1, 3):
        error = run(
            directory,
            lambda store, n=after: FailingStore(SlowStore(store, 0.001), fail_on=operation, after=n),  # type: ignore[misc]
            windows=windows,
            staging_bytes=2 * slots * 12 * 1024,
            host_bytes=20_000,
            io_threads=3,
        )
        assert error is not None
        assert error.operation == operation


@pytest.mark.parametrize(("call", "operation"), [("preadv", "read"), ("pwritev", "write")])
@pytest.mark.parametrize("name", ["EREMOTEIO", "ENOSPC", "EROFS"])
def test_the_errno_of_the_system_call_is_what_is_raised(
    directory: Path, call: str, operation: str, name: str
) -> None:
    calls = failing_calls(call, getattr(errno, name), after=9)
    offloader = make(
        directory, open_store=lambda tier, given, size, pinned: DirectStore(directory, size, calls=calls)
    )
    with closed_in_time(offloader), pytest.raises(StoreError, match=name) as caught:
        train(offloader, SWEEPS)
    assert (caught.value.errno, caught.value.operation) == (getattr(errno, name), operation)


class LateStore(WrappedStore):
    """Answers one request, of a kind to be named, only when it is told to."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.late = ""
        self.asked, self.answer = threading.Event(), threading.Event()

    def _read(self, extent: Extent, target: memoryview) -> None:
        self._be_late("read")
        super()._read(extent, target)

    def _write(self, extent: Extent, source: memoryview) -> None:
        self._be_late("write")
        super()._write(extent, source)

    def _be_late(self, operation: str) -> None:
        if self.late == operation and not self.asked.is_set():
            self.asked.set()
            self.answer.wait()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_drive_that_answers_late_holds_the_step_up_and_changes_nothing(
    directory: Path, operation: str
) -> None:
    stores: list[LateStore] = []

    def wrap(store: Store) -> Store:
        stores.append(LateStore(store))
        return stores[0]

    offloader = make(directory, open_store=opening(wrap), windows=2)
    model = Model()
    with closed_in_time(offloader):
        fill(offloader)
        model.fill()
        stores[0].late = operation

        def sweep_all() -> None:
            for number in range(SWEEPS):
                sweep(offloader, number)
            offloader.synchronize()

        thread = threading.Thread(target=sweep_all, daemon=True)
        thread.start()
        assert stores[0].asked.wait(HANG_S)
        # Every step needs every chunk back, so nothing can end before the answer.
        assert thread.is_alive()
        stores[0].answer.set()
        thread.join(HANG_S)
        assert not thread.is_alive()
        for number in range(SWEEPS):
            model.step(number)
        assert differences(offloader, model) == []


def test_a_fault_of_one_directory_of_several_names_it(directory: Path) -> None:
    both = (directory, directory.with_name("state-b"))

    def open_part(path: Path, size: int) -> DirectStore:
        calls = failing_calls("preadv", errno.EIO, after=9) if path == both[1] else SYSTEM
        return DirectStore(path, size, calls=calls)

    offloader = make(
        directory,
        directories=both,
        open_store=lambda tier, given, size, pinned: StripedStore(given.directories, size, open_part),
    )
    with closed_in_time(offloader), pytest.raises(StoreError, match="EIO") as caught:
        train(offloader, SWEEPS)
    assert caught.value.path == str(both[1])
    assert not both[1].exists()


def test_a_fault_is_raised_again_by_every_later_call(directory: Path) -> None:
    wrap = opening(lambda store: FailingStore(store, fail_on="write", after=5))
    offloader = make(directory, open_store=wrap)
    with closed_in_time(offloader):
        for call in (lambda: fill(offloader), lambda: sweep(offloader, 0), offloader.synchronize):
            with pytest.raises(StoreError, match="EIO"):
                call()  # type: ignore[no-untyped-call]
                offloader.synchronize()


def test_a_write_that_fails_while_closing_is_raised_by_close(directory: Path) -> None:
    visited = threading.Event()

    class LateFailing(WrappedStore):
        """Fails after the last visit."""

        def _write(self, extent, source):  # type: ignore[no-untyped-def]
            if visited.is_set():
                raise StoreError("late", path=self.path, operation="write", errno=errno.EIO)
            super()._write(extent, source)

    wrap = opening(LateFailing)
    offloader = make(directory, open_store=wrap, windows=6, chunk_bytes=0, staging_bytes=1 << 20)
    fill(offloader)
    offloader.synchronize()
    sweep(offloader, 1)
    with pytest.raises(StoreError, match="late"), closed_in_time(offloader):
        visited.set()
    assert our_threads() == []
    assert not directory.exists()


def test_a_fault_of_the_disk_tier_stops_a_run_that_uses_host_memory_too(directory: Path) -> None:
    wrap = opening(lambda store: FailingStore(store, fail_on="read"))
    offloader = make(directory, open_store=wrap, host_bytes=40_000, fraction=0.8, windows=1)
    assert offloader.plan.of_tier(Tier.HOST)
    with closed_in_time(offloader), pytest.raises(StoreError, match="EIO"):
        train(offloader, 2)
