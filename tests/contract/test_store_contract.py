"""What every store must do, whatever holds its bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from muon_offload_cli.storage.buffer import HostBuffer
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import ALIGNMENT, Extent, lay_out
from muon_offload_cli.storage.mapped import MappedStore
from muon_offload_cli.storage.memory import MemoryStore
from muon_offload_cli.storage.store import Store, StoreError
from muon_offload_cli.storage.striped import StripedStore
from muon_offload_cli.units import MIB
from tests.fakes.drive import directory_on_a_drive
from tests.fakes.stores import FakePinner, WrappedStore, buffered_calls

Make = Callable[[int], Store]


def _makers(directory: Path) -> dict[str, Make]:
    return {
        "memory": lambda size: MemoryStore(size, False),
        "pinned": lambda size: MemoryStore(size, True, pinner=FakePinner()),
        "mapped": lambda size: MappedStore(directory, size),
        "direct": lambda size: DirectStore(directory, size),
        "buffered": lambda size: DirectStore(directory, size, calls=buffered_calls()),
        "striped": lambda size: StripedStore(_three(directory), size, DirectStore),
        "striped-mapped": lambda size: StripedStore(_three(directory), size, MappedStore),
        "wrapped": lambda size: WrappedStore(DirectStore(directory, size)),
    }


def _three(directory: Path) -> list[Path]:
    return [directory, directory.with_name("state-b"), directory.with_name("state-c")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return directory_on_a_drive(tmp_path) / "state"


@pytest.fixture(
    params=["memory", "pinned", "mapped", "direct", "buffered", "striped", "striped-mapped", "wrapped"]
)
def make(request: pytest.FixtureRequest, directory: Path) -> Make:
    return _makers(directory)[request.param]


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    with HostBuffer(4 * MIB) as buffer:
        yield buffer


def _fill(target: memoryview, seed: int) -> bytes:
    data = random.Random(seed).randbytes(target.nbytes)
    target[:] = data
    return data


def _read(store: Store, extent: Extent) -> bytes:
    with HostBuffer(extent.nbytes) as target:
        store.read_into(extent, target.memory)
        return bytes(target.memory)


def test_bytes_that_were_never_written_are_zero(make: Make) -> None:
    with make(MIB) as store:
        assert _read(store, Extent(0, MIB)) == bytes(MIB)
        assert bytes(store.view(Extent(0, MIB))) == bytes(MIB)


def test_random_extents_survive_the_round_trip_from_many_threads(make: Make) -> None:
    sizes = [random.Random(7).randrange(1, 300_000) for _ in range(40)]
    extents = lay_out(sizes)

    def round_trips(index: int) -> bool:
        extent = extents[index]
        for turn in range(3):
            with HostBuffer(extent.nbytes) as source:
                data = _fill(source.memory, seed=100 * turn + index)
                for start in range(0, extent.nbytes, 64 * 1024):
                    piece = source.memory[start : start + 64 * 1024]
                    store.write_from(Extent(extent.offset + start, piece.nbytes), piece)
            if _read(store, extent) != data:
                return False
        return True

    with make(extents[-1].end) as store, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trips, range(len(extents))))
        last = [random.Random(200 + index).randbytes(extent.nbytes) for index, extent in enumerate(extents)]
        assert [_read(store, extent) for extent in extents] == last


def test_a_write_leaves_the_bytes_around_its_extent_alone(make: Make, buffer: HostBuffer) -> None:
    whole, inner = Extent(0, 8 * ALIGNMENT), Extent(3 * ALIGNMENT, 2 * ALIGNMENT)
    with make(whole.nbytes) as store:
        before = _fill(buffer.memory[: whole.nbytes], seed=1)
        store.write_from(whole, buffer.memory[: whole.nbytes])
        new = _fill(buffer.memory[: inner.nbytes], seed=2)
        store.write_from(inner, buffer.memory[: inner.nbytes])
        assert _read(store, whole) == before[: inner.offset] + new + before[inner.end :]


def test_a_read_leaves_the_bytes_around_its_target_alone(make: Make, buffer: HostBuffer) -> None:
    with make(MIB) as store:
        before = _fill(buffer.memory, seed=3)
        store.read_into(Extent(0, ALIGNMENT), buffer.memory[ALIGNMENT : 2 * ALIGNMENT])
    assert bytes(buffer.memory) == before[:ALIGNMENT] + bytes(ALIGNMENT) + before[2 * ALIGNMENT :]


def test_one_view_shows_every_later_write(make: Make, buffer: HostBuffer) -> None:
    extent = Extent(ALIGNMENT, 64 * ALIGNMENT)
    with make(MIB) as store:
        view = store.view(extent)
        for seed in range(5):
            data = _fill(buffer.memory[: extent.nbytes], seed)
            store.write_from(extent, buffer.memory[: extent.nbytes])
            assert bytes(view) == data, f"after write {seed}"
        del view


def test_a_view_is_writable_memory_as_torch_wants_it(make: Make) -> None:
    with make(MIB) as store:
        view = store.view(Extent(0, ALIGNMENT))
        assert not view.readonly
        assert view.nbytes == ALIGNMENT
        del view


def test_what_was_flushed_is_read_back(make: Make, buffer: HostBuffer) -> None:
    with make(MIB) as store:
        data = _fill(buffer.memory[:MIB], seed=4)
        store.write_from(Extent(0, MIB), buffer.memory[:MIB])
        store.flush()
        assert _read(store, Extent(0, MIB)) == data


def test_a_store_of_no_bytes_works(make: Make, buffer: HostBuffer) -> None:
    with make(0) as store:
        store.write_from(Extent(0, 0), buffer.memory[:0])
        store.read_into(Extent(0, 0), buffer.memory[:0])
        assert store.view(Extent(0, 0)).nbytes == 0
        store.flush()
        with pytest.raises(ValueError, match="beyond"):
            store.read_into(Extent(0, ALIGNMENT), buffer.memory[:ALIGNMENT])


@pytest.mark.parametrize("operation", ["read_into", "write_from"])
def test_a_buffer_of_another_size_is_refused(make: Make, buffer: HostBuffer, operation: str) -> None:
    with make(MIB) as store, pytest.raises(ValueError, match="does not fit"):
        getattr(store, operation)(Extent(0, ALIGNMENT), buffer.memory[: 2 * ALIGNMENT])


def test_an_extent_beyond_the_end_is_refused(make: Make, buffer: HostBuffer) -> None:
    beyond = Extent(MIB - ALIGNMENT, 2 * ALIGNMENT)
    with make(MIB) as store:
        with pytest.raises(ValueError, match="beyond"):
            store.write_from(beyond, buffer.memory[: beyond.nbytes])
        with pytest.raises(ValueError, match="beyond"):
            store.view(beyond)


def test_a_closed_store_refuses_everything_and_closes_twice(make: Make, buffer: HostBuffer) -> None:
    store = make(MIB)
    store.close()
    store.close()
    extent, memory = Extent(0, ALIGNMENT), buffer.memory[:ALIGNMENT]
    operations = {
        "read": lambda: store.read_into(extent, memory),
        "write": lambda: store.write_from(extent, memory),
        "view": lambda: store.view(extent),
        "flush": store.flush,
    }
    for name, operation in operations.items():
        with pytest.raises(StoreError, match="closed") as caught:
            operation()
        assert caught.value.operation == name
        assert caught.value.path == store.path


def test_closing_while_a_read_runs_lets_it_end(make: Make) -> None:
    class Closing(WrappedStore):
        """Is closed in the middle of a read."""

        def _read(self, extent: Extent, target: memoryview) -> None:
            self.close()
            assert self.closed
            assert not inner.closed
            super()._read(extent, target)

    inner = make(MIB)
    with HostBuffer(MIB) as source:
        data = _fill(source.memory, seed=5)
        inner.write_from(Extent(0, MIB), source.memory)
    assert _read(Closing(inner), Extent(0, MIB)) == data
    assert inner.closed


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_descriptors_and_mappings_stay_flat(make: Make, buffer: HostBuffer) -> None:
    def open_use_close() -> None:
        with make(MIB) as store:
            store.view(Extent(0, ALIGNMENT))
            store.read_into(Extent(0, ALIGNMENT), buffer.memory[:ALIGNMENT])

    open_use_close()
    descriptors, mappings = _descriptors(), _mappings()
    for _ in range(200):
        open_use_close()
    assert _descriptors() == descriptors
    assert _mappings() <= mappings + 8  # the interpreter's own arenas come and go

    with make(MIB) as store:
        views = [store.view(Extent(0, ALIGNMENT))]
        descriptors, mappings = _descriptors(), _mappings()
        for _ in range(200):
            store.read_into(Extent(0, ALIGNMENT), buffer.memory[:ALIGNMENT])
            views.append(store.view(Extent(0, ALIGNMENT)))
        assert _descriptors() == descriptors
        assert _mappings() <= mappings + 8
        del views


def test_nothing_has_a_name_on_disk(make: Make, directory: Path) -> None:
    with make(MIB) as store:
        files = len(store.parts) if store.on_disk else 0
        assert sum(folder.is_dir() for folder in _three(directory)) == files
        assert not any(list(folder.iterdir()) for folder in _three(directory)[:files])
    assert not any(folder.exists() for folder in _three(directory))
