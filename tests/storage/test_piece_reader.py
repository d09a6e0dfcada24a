"""Reading a file piece by piece, and putting what was read into a direct store."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.piece_reader import DamagedFile, FileRange, PieceReader
from muon_offload_cli.storage.piece_writer import PieceWriter
from muon_offload_cli.storage.placing import Placing
from muon_offload_cli.storage.sources import Sources
from muon_offload_cli.units import PIECE_BYTES
from tests.fakes.drive import directory_on_a_drive

SIZE = 2 * PIECE_BYTES + 12_345
DATA = os.urandom(SIZE)
CUTS = (0, 100, 70_000, 70_001, PIECE_BYTES + 5, 2 * PIECE_BYTES, SIZE)
PIECES = [(end - start, xxhash.xxh3_64_hexdigest(DATA[start:end])) for start, end in pairwise(CUTS)]


@pytest.fixture
def sources() -> Iterator[Sources]:
    with Sources([]) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


def test_a_whole_file_and_any_range_of_it_are_read(sources: Sources, file: Path) -> None:
    for pieces in (PIECES, None):
        reader = PieceReader(file, pieces, sources)
        assert io.BufferedReader(FileRange(reader, 0, SIZE)).read() == DATA
        part = FileRange(reader, 69_990, 20)
        part.seek(-15, os.SEEK_END)
        assert (part.tell(), part.read(), part.read()) == (5, DATA[69_995:70_010], b"")
        reader.close()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(start=st.integers(0, SIZE), length=st.integers(0, SIZE))
def test_ranges_are_what_the_file_has_there(sources: Sources, file: Path, start: int, length: int) -> None:
    length = min(length, SIZE - start)
    reader = PieceReader(file, PIECES, sources)
    target = bytearray(length)
    reader.read_into(memoryview(target), start)
    reader.close()
    assert target == DATA[start : start + length]


@pytest.mark.parametrize("position", [0, 99, 100, 70_000, PIECE_BYTES + 4, SIZE - 1])
def test_a_flipped_bit_is_found_in_its_piece_and_nowhere_else(
    sources: Sources, file: Path, position: int
) -> None:
    data = bytearray(DATA)
    data[position] ^= 16
    file.write_bytes(data)
    reader = PieceReader(file, PIECES, sources)
    for start, end in pairwise(CUTS):
        target = memoryview(bytearray(end - start))
        if start <= position < end:
            with pytest.raises(DamagedFile, match=f"is damaged between bytes {start} and {end}"):
                reader.read_into(target, start)
        else:
            reader.read_into(target, start)
    reader.close()


@pytest.mark.parametrize("pieces", [PIECES, None])
def test_a_file_that_is_too_short_says_so(
    sources: Sources, file: Path, pieces: list[tuple[int, str]] | None
) -> None:
    with file.open("r+b") as stream:
        stream.truncate(SIZE - 1)
    reader = PieceReader(file, pieces, sources)
    with pytest.raises(DamagedFile, match="is truncated"):
        reader.read_into(memoryview(bytearray(100)), SIZE - 100)
    reader.close()


def test_torch_loads_from_a_range_of_what_a_writer_wrote_and_reads_it_once(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(3, 1_000_000)
    read_from_drive: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        read_from_drive.append(preadv(fd, buffers, offset))
        return read_from_drive[-1]

    writer = PieceWriter(tmp_path / "file", sources)
    writer.write(b"before")
    start = writer.tell()
    torch.save(tensor, writer)  # type: ignore[arg-type]
    length = writer.tell() - start
    writer.write(b"behind")
    writer.close()
    reader = PieceReader(tmp_path / "file", writer.pieces, sources)
    monkeypatch.setattr(os, "preadv", counting)
    loaded = torch.load(FileRange(reader, start, length), weights_only=True)  # type: ignore[arg-type]
    reader.close()
    assert torch.equal(loaded, tensor)
    # Torch looks at the end first. Small pieces share pages.
    assert tensor.nbytes <= sum(read_from_drive) < tensor.nbytes + 64 * 1024


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectStore]:
    with DirectStore(directory_on_a_drive(tmp_path) / "state", 3 * PIECE_BYTES) as made:
        yield made


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(1, 2 * PIECE_BYTES // 512), min_size=1, max_size=6, unique=True))
def test_neighbours_that_share_pages_are_placed_side_by_side(store: DirectStore, cuts: list[int]) -> None:
    places = [0, *(512 * cut for cut in sorted(cuts))]
    expected = bytearray(store.view(Extent(0, store.size)))
    with contextlib.closing(Placing()) as placing:
        for number, (start, end) in enumerate(pairwise(places)):
            # The last byte of each range is left alone, as between two ranges of a chunk.
            data = bytes([number + 1]) * (end - start - 1)
            expected[start : end - 1] = data
            placing.put(store, start, memoryview(data))
        placing.finish()
    assert store.view(Extent(0, store.size)) == expected
