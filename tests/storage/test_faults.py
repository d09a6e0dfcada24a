"""What the stores on a drive do when the system fails them."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from muon_offload_cli.storage.buffer import HostBuffer
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import ALIGNMENT, Extent
from muon_offload_cli.storage.file_store import FileStore
from muon_offload_cli.storage.mapped import MappedStore
from muon_offload_cli.storage.store import StoreError
from muon_offload_cli.storage.system_calls import SYSTEM, SystemCalls
from tests.fakes.drive import directory_on_a_drive
from tests.fakes.stores import (
    FailingStore,
    ShortStore,
    buffered_calls,
    failing_calls,
    interrupted_calls,
    ragged_calls,
    short_calls,
)

EXTENT = Extent(2 * ALIGNMENT, 16 * ALIGNMENT)
SIZE = 32 * ALIGNMENT
Make = Callable[[SystemCalls], FileStore]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return directory_on_a_drive(tmp_path) / "state"


@pytest.fixture(params=["mapped", "direct", "buffered"])
def make(request: pytest.FixtureRequest, directory: Path) -> Make:
    return {
        "mapped": lambda calls: MappedStore(directory, SIZE, calls=calls),
        "direct": lambda calls: DirectStore(directory, SIZE, calls=calls),
        "buffered": lambda calls: DirectStore(directory, SIZE, calls=buffered_calls(calls=calls)),
    }[request.param]


@pytest.fixture
def source() -> Iterator[memoryview]:
    with HostBuffer(EXTENT.nbytes) as buffer:
        buffer.memory[:] = os.urandom(EXTENT.nbytes)
        yield buffer.memory


@pytest.fixture
def target() -> Iterator[memoryview]:
    with HostBuffer(EXTENT.nbytes) as buffer:
        yield buffer.memory


@pytest.mark.parametrize(
    "calls",
    [short_calls(ALIGNMENT), ragged_calls(1), ragged_calls(ALIGNMENT - 1), interrupted_calls()],
    ids=["one page a call", "one byte short", "a page less a byte short", "interrupted"],
)
def test_short_and_interrupted_calls_are_continued(
    make: Make, calls: SystemCalls, source: memoryview, target: memoryview
) -> None:
    with make(calls) as store:
        store.write_from(EXTENT, source)
        store.read_into(EXTENT, target)
        assert target == source
        assert bytes(store.view(Extent(0, EXTENT.offset))) == bytes(EXTENT.offset)
        assert bytes(store.view(Extent(EXTENT.end, ALIGNMENT))) == bytes(ALIGNMENT)


@pytest.mark.parametrize(("operation", "call"), [("read", "preadv"), ("write", "pwritev")])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_drive_error_names_path_operation_place_and_cause(
    make: Make, directory: Path, source: memoryview, operation: str, call: str, code: int
) -> None:
    with make(failing_calls(call, code)) as store, pytest.raises(StoreError) as caught:
        _do(store, operation, source)
    error = caught.value
    assert (error.path, error.operation, error.errno) == (str(directory), operation, code)
    assert (error.offset, error.nbytes) == (EXTENT.offset, EXTENT.nbytes)
    for part in (str(directory), operation, errno.errorcode[code], os.strerror(code), "64.00 KiB", "8192"):
        assert part in str(error)


@pytest.mark.parametrize(("operation", "call"), [("read", "preadv"), ("write", "pwritev")])
def test_an_error_in_the_middle_of_an_extent_is_not_swallowed(
    make: Make, source: memoryview, operation: str, call: str
) -> None:
    calls = failing_calls(call, errno.EIO, after=3, calls=short_calls(ALIGNMENT))
    with make(calls) as store, pytest.raises(StoreError, match="EIO"):
        _do(store, operation, source)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_call_that_moves_nothing_is_an_error_and_no_endless_loop(
    make: Make, source: memoryview, operation: str
) -> None:
    with make(short_calls(0)) as store, pytest.raises(StoreError, match=r"moved") as caught:
        _do(store, operation, source)
    assert caught.value.errno == 0


@pytest.mark.parametrize("left", [EXTENT.offset + 5 * ALIGNMENT, EXTENT.offset + 5 * ALIGNMENT + 100, 0])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_file_cut_behind_our_back_is_an_error_and_is_not_made_long_again(
    make: Make, source: memoryview, left: int, operation: str
) -> None:
    with make(SYSTEM) as store:
        store.write_from(EXTENT, source)
        os.ftruncate(store.fd, left)
        for _ in range(2):
            with pytest.raises(StoreError, match=f"cut behind our back: {left} of {SIZE} bytes are left"):
                _do(store, operation, source)


def test_a_read_that_meets_the_end_of_the_file_says_so(make: Make, source: memoryview) -> None:
    # As when the file is cut between the look at its size and the read.
    with (
        make(replace(SYSTEM, preadv=lambda *_: 0)) as store,
        pytest.raises(StoreError, match=f"the file ends there.*file size {SIZE}"),
    ):
        store.read_into(EXTENT, source)


def test_a_drive_that_answers_after_five_seconds_is_waited_for_and_remembered(
    make: Make, source: memoryview, target: memoryview
) -> None:
    now = 100.0

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal now
        now += 5.0 if now == 100.0 else 0.01
        return SYSTEM.pwritev(fd, buffers, offset)

    with make(replace(SYSTEM, pwritev=pwritev, monotonic=lambda: now)) as store:
        for _ in range(2):
            store.write_from(EXTENT, source)
        store.read_into(EXTENT, target)
        assert target == source
        assert store.slowest_s == 5.0


def test_a_failed_flush_is_an_error(make: Make, source: memoryview) -> None:
    with make(failing_calls("fdatasync", errno.EIO)) as store:
        store.write_from(EXTENT, source)
        with pytest.raises(StoreError, match=r"flush.*EIO") as caught:
            store.flush()
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("wrong", ["address", "offset", "size"])
def test_direct_stores_refuse_what_is_not_aligned(directory: Path, target: memoryview, wrong: str) -> None:
    extent, memory = {
        "address": (Extent(0, ALIGNMENT), target[512 : 512 + ALIGNMENT]),
        "offset": (Extent(512, ALIGNMENT), target[:ALIGNMENT]),
        "size": (Extent(0, 512), target[:512]),
    }[wrong]
    for calls in (SYSTEM, buffered_calls()):
        with DirectStore(directory, SIZE, calls=calls) as store:
            with pytest.raises(ValueError, match="not aligned"):
                store.read_into(extent, memory)
            with pytest.raises(ValueError, match="not aligned"):
                store.write_from(extent, memory)


def test_a_direct_store_says_whether_it_is_direct(directory: Path) -> None:
    with DirectStore(directory, SIZE, calls=buffered_calls()) as store:
        assert not store.direct
    with MappedStore(directory, SIZE) as store:
        assert not store.direct


def test_a_store_error_survives_pickling() -> None:
    error = StoreError("EIO", path="/x", operation="read", offset=1, nbytes=2, errno=5)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errno, again.path) == (str(error), 5, "/x")


@pytest.mark.parametrize("operation", ["read", "write"])
def test_the_failing_fake_fails_only_where_and_when_it_should(
    directory: Path, source: memoryview, operation: str
) -> None:
    with FailingStore(DirectStore(directory, SIZE), fail_on=operation, after=2) as store:
        other = "write" if operation == "read" else "read"
        for _ in range(2):
            _do(store, operation, source)
            _do(store, other, source)
        with pytest.raises(StoreError, match="EIO"):
            _do(store, operation, source)
        _do(store, other, source)


def test_the_short_fake_fails_reads_after_the_good_ones(directory: Path, source: memoryview) -> None:
    with ShortStore(DirectStore(directory, SIZE), after=1) as store:
        store.read_into(EXTENT, source)
        with pytest.raises(StoreError, match="ends there"):
            store.read_into(EXTENT, source)


def _do(store: FileStore | FailingStore, operation: str, memory: memoryview) -> None:
    if operation == "read":
        store.read_into(EXTENT, memory)
    else:
        store.write_from(EXTENT, memory)
