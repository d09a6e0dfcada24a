"""Writing a file from memory and from a direct store."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muon_offload_cli.storage.buffer import HostBuffer, address_of
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.memory import MemoryStore
from muon_offload_cli.storage.piece_writer import PieceWriter
from muon_offload_cli.storage.sources import Sources
from muon_offload_cli.storage.store import Store
from muon_offload_cli.storage.striped import StripedStore
from muon_offload_cli.units import PIECE_BYTES

SIZE = 3 * PIECE_BYTES


@pytest.fixture(params=["direct", "striped", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = {
        "direct": lambda: DirectStore(tmp_path / "state", SIZE),
        "striped": lambda: StripedStore([tmp_path / "state", tmp_path / "state-b"], SIZE, DirectStore),
        "memory": lambda: MemoryStore(SIZE, pin=False),
    }[request.param]()
    with made, HostBuffer(SIZE) as buffer:
        buffer.memory[:] = os.urandom(SIZE)
        made.write_from(Extent(0, SIZE), buffer.memory)
        yield made


def test_the_file_is_the_bytes_in_order_and_pieces_hash_them(store: Store, tmp_path: Path) -> None:
    view = store.view(Extent(0, SIZE))
    sources = Sources([store])
    parts = [b"head", view[512 : PIECE_BYTES + 5000], b"x" * 70_000, view[SIZE - 100_000 :], b"tail"]
    writer = PieceWriter(tmp_path / "file", sources)
    boundaries = []
    for part in parts:
        boundaries.append(writer.tell())
        writer.write(part)
    os.fsync(writer.fileno())
    writer.close()
    sources.close()
    data = (tmp_path / "file").read_bytes()
    assert data == b"".join(bytes(part) for part in parts)
    ends, offset = [], 0
    for length, digest in writer.pieces:
        assert xxhash.xxh3_64_hexdigest(data[offset : offset + length]) == digest
        offset += length
        ends.append(offset)
    assert offset == len(data)
    assert set(boundaries) <= {0, *ends}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cuts=st.lists(st.tuples(st.integers(0, SIZE // 512 - 1), st.integers(1, 3 * 2**20)), max_size=6))
def test_any_ranges_of_a_store_arrive(store: Store, tmp_path: Path, cuts: list[tuple[int, int]]) -> None:
    view = store.view(Extent(0, SIZE))
    sources = Sources([store])
    parts = [view[start * 512 : min(SIZE, start * 512 + length)] for start, length in cuts]
    with PieceWriter(tmp_path / "file", sources) as writer:
        for part in parts:
            writer.write(part)
    sources.close()
    assert (tmp_path / "file").read_bytes() == b"".join(bytes(part) for part in parts)


def test_memory_of_the_caller_may_change_once_write_returns(tmp_path: Path) -> None:
    sources = Sources([])
    data = bytearray(b"a" * 100_000)
    with PieceWriter(tmp_path / "file", sources) as writer:
        writer.write(memoryview(data))
        data[:] = b"b" * len(data)
    sources.close()
    assert (tmp_path / "file").read_bytes() == b"a" * 100_000


def test_a_full_disk_is_raised_with_the_file_and_leaves_no_thread(store: Store, tmp_path: Path) -> None:
    def full(_fd: int, _data: memoryview, position: int) -> int:
        if position >= PIECE_BYTES:
            raise OSError(errno.ENOSPC, "full")
        return len(_data)

    before = threading.active_count()
    sources = Sources([store])
    writer = PieceWriter(tmp_path / "file", sources, pwrite=full)
    with pytest.raises(OSError, match="full") as raised:
        # Whichever of the two meets it first.
        writer.write(store.view(Extent(0, SIZE)))
        writer.fileno()
    assert raised.value.filename == str(tmp_path / "file")
    assert writer.error is not None
    with pytest.raises(OSError, match="full"):
        writer.close()
    sources.close()
    assert threading.active_count() == before


def test_a_short_write_goes_on_through_the_page_cache(store: Store, tmp_path: Path) -> None:
    cut = iter([1000])

    def short(fd: int, data: memoryview, position: int) -> int:
        return min(os.pwrite(fd, data, position), next(cut, data.nbytes))

    view = store.view(Extent(0, SIZE))
    with Sources([store]) as sources, PieceWriter(tmp_path / "file", sources, pwrite=short) as writer:
        writer.write(view)
    assert not writer.direct
    assert (tmp_path / "file").read_bytes() == view


def test_reading_a_direct_store_leaves_its_pages_out_of_memory(tmp_path: Path) -> None:
    with DirectStore(tmp_path / "state", SIZE) as store:
        if not store.direct:
            pytest.skip("no direct I/O here")
        view = store.view(Extent(0, SIZE))
        store.flush()
        store.drop_cache()
        sources = Sources([store])
        with PieceWriter(tmp_path / "file", sources) as writer:
            writer.write(view)
        sources.close()
        assert resident_bytes(view) == 0


def resident_bytes(view: memoryview) -> int:
    """Bytes of a mapping that are mapped into this process, from smaps."""
    address = address_of(view)
    for block in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1]:
        lines = block.strip().splitlines()
        head = next(line for line in lines if "-" in line.split()[0] and ":" not in line.split()[0])
        start, end = (int(part, 16) for part in head.split()[0].split("-"))
        if start <= address < end:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    raise AssertionError("the view is in no mapping")


def test_a_byte_of_a_direct_store_that_is_touched_brings_no_others_with_it(store: Store) -> None:
    def advised() -> bool:
        """Whether the kernel is told not to read ahead, anywhere in this process's memory."""
        return any("rr" in line.split() for line in Path("/proc/self/smaps").read_text().splitlines())

    assert not advised()
    with Sources([store]):
        assert advised() == store.direct
    assert not advised()
