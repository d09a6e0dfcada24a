"""Reading ranges of a large file, piece by piece and several at once, comparing every piece with its hash."""

from __future__ import annotations

import bisect
import contextlib
import io
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from itertools import accumulate
from pathlib import Path

import xxhash

from muon_offload_cli.storage.buffer import copy_bytes
from muon_offload_cli.storage.extent import ALIGNMENT
from muon_offload_cli.storage.sources import Sources
from muon_offload_cli.storage.store import describe_errno
from muon_offload_cli.units import PIECE_BYTES, round_up

KEPT = 8
"""Pieces that were asked for in part are kept until the rest is: torch looks at the end of an archive first,
and so at the last bytes of the tensor in it."""


class DamagedFile(Exception):  # noqa: N818
    """A file is not what was saved; `how` ends a sentence about it."""

    def __init__(self, path: Path, how: str) -> None:
        super().__init__(f"{path} {how}")


class PieceReader:
    """A file of known pieces. What is read passes the page cache by where the filesystem lets it.

    Args:
        path: The file.
        pieces: Length and hash of every piece in order; None: not known, nothing is compared.
        sources: Threads and buffers.

    Raises:
        DamagedFile: The file cannot be opened.
    """

    def __init__(self, path: Path, pieces: Sequence[tuple[int, str]] | None, sources: Sources) -> None:
        self.path = path
        self._sources = sources
        with _told(path):
            self._fd = _open(path)
        self._size = os.fstat(self._fd).st_size
        if pieces is None:
            starts = range(0, self._size, PIECE_BYTES)
            pieces = [(min(PIECE_BYTES, self._size - start), "") for start in starts]
        self._pieces = pieces
        self._ends = list(accumulate(length for length, _ in pieces))
        self._kept: dict[int, bytes] = {}

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` from byte `start` on.

        Raises:
            DamagedFile: The file is too short, cannot be read, or a piece is not what was saved; `target`
                holds anything.
        """
        end = start + target.nbytes
        if end > self._size or (self._ends and end > self._ends[-1]):
            raise DamagedFile(self.path, f"is truncated: {self._size} bytes, at least {end} are needed")
        work = []
        first = bisect.bisect_right(self._ends, start)
        for index in range(first, bisect.bisect_left(self._ends, end) + 1):
            begin = self._ends[index] - self._pieces[index][0]
            low, high = max(begin, start), min(self._ends[index], end)
            if low < high:
                place = target[low - start : high - start]
                work.append(self._sources.pool.submit(self._read_piece, index, low - begin, place))
        wait(work)
        for each in work:
            each.result()

    def _read_piece(self, index: int, skip: int, target: memoryview) -> None:
        kept = self._kept.get(index)
        if kept is not None:
            target[:] = kept[skip : skip + target.nbytes]
            if target.nbytes == len(kept):
                self._kept.pop(index, None)
            return
        length, digest = self._pieces[index]
        begin = self._ends[index] - length
        start = begin // ALIGNMENT * ALIGNMENT
        with self._sources.scratch.lend() as memory:
            self._fill(memory, start, begin + length)
            data = memory[begin - start :][:length]
            if digest and xxhash.xxh3_64_hexdigest(data) != digest:
                raise DamagedFile(self.path, f"is damaged between bytes {begin} and {begin + length}")
            copy_bytes(target, data[skip : skip + target.nbytes])
            if target.nbytes < length:
                self._kept[index] = bytes(data)
                for oldest in list(self._kept)[:-KEPT]:
                    self._kept.pop(oldest, None)

    def _fill(self, memory: memoryview, start: int, end: int) -> None:
        """Read from an aligned place until `end` is there; the last page may reach beyond the file."""
        wanted, done = round_up(end, ALIGNMENT) - start, 0
        while start + done < end:
            with _told(self.path):
                count = os.preadv(self._fd, [memory[done:wanted]], start + done)
            if count == 0:
                raise DamagedFile(self.path, f"ends at byte {start + done} while it is read")
            done += count
            if start + done < end:
                # Direct I/O goes on at an aligned place only.
                done = done // ALIGNMENT * ALIGNMENT

    def close(self) -> None:
        """Close the file."""
        self._kept.clear()
        os.close(self._fd)


class FileRange(io.RawIOBase):
    """A range of a `PieceReader`'s file, as a file of its own.

    Attributes:
        fault: What a read of it met. A reader in C++ may raise something else in its place.
    """

    def __init__(self, reader: PieceReader, start: int, length: int) -> None:
        super().__init__()
        self._reader, self._start, self._length = reader, start, length
        self._position = 0
        self.fault: DamagedFile | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, and return the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        """Read as many bytes as there are; raises as `PieceReader.read_into` does."""
        view = memoryview(target).cast("B")
        count = max(0, min(view.nbytes, self._length - self._position))
        if count:
            try:
                self._reader.read_into(view[:count], self._start + self._position)
            except DamagedFile as fault:
                self.fault = fault
                raise
        self._position += count
        return count


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DamagedFile(path, f"cannot be read: {describe_errno(error)}") from error


def _open(path: Path) -> int:
    """Open for reading, with direct I/O if the filesystem really does it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.preadv(fd, [page], 0)
    except OSError:
        os.close(fd)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return fd
