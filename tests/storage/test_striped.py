from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.errors import UserError
from muon_offload_cli.storage.buffer import HostBuffer
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import StoreError
from muon_offload_cli.storage.striped import StripedStore
from muon_offload_cli.storage.stripes import MOST_STRIPE_BYTES, Stripes
from muon_offload_cli.units import MIB
from tests.fakes.drive import directory_on_a_drive, small_filesystem
from tests.fakes.stores import buffered_calls, failing_calls

pages = st.integers(0, 40_000).map(lambda count: count * 4096)
files = st.integers(1, 8)


@given(pages, files)
def test_files_share_the_bytes_evenly_and_lose_none(size: int, files: int) -> None:
    stripes = Stripes(size=size, files=files)
    shares = stripes.file_bytes()
    assert sum(shares) == size
    assert max(shares) - min(shares) <= stripes.stripe_bytes <= MOST_STRIPE_BYTES
    assert stripes.stripe_bytes % mmap.PAGESIZE == 0
    assert stripes.count == len(list(stripes.parts(Extent(0, size))))
    # A small store is spread as evenly as a large one.
    assert not size or max(shares) - min(shares) <= max(size // files // 8, mmap.PAGESIZE)


@given(pages, files, st.data())
def test_parts_cover_an_extent_in_order_and_no_two_bytes_share_a_place(
    size: int, files: int, data: st.DataObject
) -> None:
    stripes = Stripes(size=size, files=files)
    offset = data.draw(st.integers(0, size))
    extent = Extent(offset, data.draw(st.integers(0, size - offset)))
    end = 0
    for file, part, start in stripes.parts(extent):
        assert start == end
        assert 0 <= file < files
        stripe = part.offset // stripes.stripe_bytes * files + file
        assert stripe * stripes.stripe_bytes + part.offset % stripes.stripe_bytes == offset + start
        end = start + part.nbytes
    assert end == extent.nbytes


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    root = directory_on_a_drive(tmp_path)
    return [root / "a", root / "b"]


def test_each_directory_holds_half_of_what_is_written(directories: list[Path]) -> None:
    with HostBuffer(MIB) as buffer, StripedStore(directories, MIB, DirectStore) as store:
        buffer.memory[:] = b"x" * MIB
        store.write_from(Extent(0, MIB), buffer.memory)
        assert store.path == ", ".join(map(str, directories))
        assert [bytes(part.view(Extent(0, part.size))) for part in store.parts] == [b"x" * (MIB // 2)] * 2


@pytest.mark.parametrize(("call", "operation"), [("preadv", "read"), ("pwritev", "write")])
def test_an_error_names_the_one_directory_that_it_comes_from(
    directories: list[Path], call: str, operation: str
) -> None:
    def open_part(directory: Path, size: int) -> DirectStore:
        broken = directory == directories[1]
        return DirectStore(
            directory, size, **{"calls": failing_calls(call, errno.EIO, after=1)} if broken else {}
        )

    with (
        HostBuffer(MIB) as buffer,
        StripedStore(directories, MIB, open_part) as store,
        pytest.raises(StoreError, match="EIO") as caught,
    ):
        store.write_from(Extent(0, MIB), buffer.memory)
        store.read_into(Extent(0, MIB), buffer.memory)
    assert (caught.value.path, caught.value.operation) == (str(directories[1]), operation)


def test_a_failed_flush_of_one_file_is_an_error(directories: list[Path]) -> None:
    def open_part(directory: Path, size: int) -> DirectStore:
        calls = failing_calls("fdatasync", errno.EIO, after=0 if directory == directories[1] else 99)
        return DirectStore(directory, size, calls=calls)

    with (
        StripedStore(directories, MIB, open_part) as store,
        pytest.raises(StoreError, match="flush") as caught,
    ):
        store.flush()
    assert caught.value.path == str(directories[1])


def test_one_filesystem_that_refuses_direct_io_is_told_from_the_others(directories: list[Path]) -> None:
    def open_part(directory: Path, size: int) -> DirectStore:
        return DirectStore(
            directory, size, **{"calls": buffered_calls()} if directory == directories[1] else {}
        )

    with StripedStore(directories, MIB, open_part) as store:
        assert not store.direct
        assert [part.direct for part in store.parts] == [True, False]


def test_a_full_directory_among_several_is_named_and_the_others_are_left_clean(
    tmp_path: Path, directories: list[Path]
) -> None:
    with small_filesystem(tmp_path, mib=16) as mounted:
        with pytest.raises(UserError) as caught:
            StripedStore([directories[0], mounted / "state"], 64 * MIB, DirectStore)
        (problem,) = caught.value.problems
        assert problem.exit_code == 3
        assert f"32.00 MiB on {mounted}" in problem.what
        assert "leave this one out" in problem.fix
        assert not (mounted / "state").exists()
    assert not directories[0].exists()


def test_a_tensor_across_stripes_is_one_view_that_may_be_written(directories: list[Path]) -> None:
    with StripedStore(directories, 4 * MIB, DirectStore) as store, HostBuffer(4 * MIB) as buffer:
        view = store.view(Extent(MIB, 2 * MIB))
        view[:] = b"y" * view.nbytes
        store.flush()
        store.read_into(Extent(0, 4 * MIB), buffer.memory)
        assert bytes(buffer.memory) == bytes(MIB) + b"y" * 2 * MIB + bytes(MIB)
        del view
