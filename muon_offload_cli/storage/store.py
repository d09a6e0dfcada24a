"""What every store can do: move the bytes of an extent, show them, and say what went wrong."""

from __future__ import annotations

import errno as errno_names
import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from muon_offload_cli.storage.buffer import address_of
from muon_offload_cli.storage.closing import Closing
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.units import format_bytes


class StoreError(Exception):
    """A store could not read, write, show or flush bytes.

    Attributes:
        path: Directory of the store; empty for host memory.
        operation: ``read``, ``write``, ``view``, ``flush`` or ``open``.
        offset: First byte concerned.
        nbytes: Bytes concerned.
        errno: The system's error number; 0 where the system reported none (end of file, closed store).
    """

    def __init__(
        self, reason: str, *, path: str, operation: str, offset: int = 0, nbytes: int = 0, errno: int = 0
    ) -> None:
        self.reason = reason
        self.path = path
        self.operation = operation
        self.offset = offset
        self.nbytes = nbytes
        self.errno = errno
        where = f"the store in {path}" if path else "the store in host memory"
        figures = f" of {format_bytes(nbytes)} at offset {offset}" if nbytes else ""
        super().__init__(f"{operation}{figures} in {where} failed: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from their positional arguments; this one has none that fit.
        fields = (self.reason, self.path, self.operation, self.offset, self.nbytes, self.errno)
        return _rebuild, fields


def _rebuild(reason: str, path: str, operation: str, offset: int, nbytes: int, errno: int) -> StoreError:
    return StoreError(reason, path=path, operation=operation, offset=offset, nbytes=nbytes, errno=errno)


def describe_errno(error: OSError) -> str:
    """Write the cause of a system error with its name, ``EIO (Input/output error)``."""
    if error.errno is None:
        return str(error)
    return f"{errno_names.errorcode.get(error.errno, str(error.errno))} ({os.strerror(error.errno)})"


class Store(Closing):
    """Reserved bytes, addressed by extents; bytes that were never written read as zero.

    All operations may be called from many threads at once. Two operations on overlapping extents have no
    order unless the caller makes one. `close` may be called while operations run: they end as usual, and the
    last one gives the resources back.

    Attributes:
        size: Bytes reserved.
        path: Directory that the bytes lie in, or all of them with commas between; empty for host memory.
        on_disk: The bytes lie on a drive.
        direct: Reads and writes pass the page cache by; buffers must be aligned.
        slowest_s: Seconds that the slowest system call of a read or write took so far.
    """

    def __init__(self, *, size: int, path: str, on_disk: bool, direct: bool) -> None:
        self.size = size
        self.path = path
        self.on_disk = on_disk
        self.direct = direct
        self.slowest_s = 0.0
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._closed

    @property
    def parts(self) -> Sequence[Store]:
        """The stores that this one is made of: itself, but where several directories share the bytes."""
        return (self,)

    def read_into(self, extent: Extent, target: memoryview) -> None:
        """Fill `target` with the bytes of `extent`; returns when they are there.

        Args:
            extent: What to read; must lie inside the store.
            target: Contiguous writable bytes, exactly as many as the extent has; the caller owns them and
                must leave them alone until this returns.

        Raises:
            StoreError: The bytes cannot be read, or the store is closed. `target` then holds anything.
            ValueError: Extent and target do not fit each other or the store.
        """
        with self._using("read", extent):
            self._check(extent, target)
            if extent.nbytes:
                self._read(extent, target)

    def write_from(self, extent: Extent, source: memoryview) -> None:
        """Write `source` to `extent`; returns when every reader sees it (`flush` takes it to the drive).

        Args:
            extent: What to write; must lie inside the store.
            source: Contiguous bytes, exactly as many as the extent has; unchanged until this returns.

        Raises:
            StoreError: The bytes cannot be written, or the store is closed. The extent then holds anything.
            ValueError: Extent and source do not fit each other or the store.
        """
        with self._using("write", extent):
            self._check(extent, source)
            if extent.nbytes:
                self._write(extent, source)

    def view(self, extent: Extent) -> memoryview:
        """Return memory that shows the bytes of `extent` as they are now and after later writes.

        The view is owned by the store and is for reading, except where the store says otherwise. It must not
        be used after `close`.

        Raises:
            StoreError: The bytes cannot be shown, or the store is closed.
            ValueError: The extent does not lie inside the store.
        """
        with self._using("view", extent):
            self._check(extent, None)
            return self._view(extent)

    def view_address(self) -> int:
        """Return the address at which views show byte 0; all views are parts of one range."""
        return address_of(self.view(Extent(0, self.size)))

    def drop_cache(self) -> None:
        """Let go of what views brought into the page cache; call `flush` first. Never loses bytes."""

    def flush(self) -> None:
        """Wait until everything written so far is on the drive.

        Raises:
            StoreError: The drive reports an error, or the store is closed.
        """
        with self._using("flush", Extent(0, 0)):
            self._flush()

    def close(self) -> None:
        """Give the bytes back; later operations raise StoreError. A second call does nothing."""
        with self._lock:
            release = not self._closed and not self._users
            self._closed = True
        if release:
            self._release()

    @abstractmethod
    def _read(self, extent: Extent, target: memoryview) -> None: ...

    @abstractmethod
    def _write(self, extent: Extent, source: memoryview) -> None: ...

    @abstractmethod
    def _view(self, extent: Extent) -> memoryview: ...

    @abstractmethod
    def _flush(self) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...

    @contextmanager
    def _using(self, operation: str, extent: Extent) -> Iterator[None]:
        """Keep the resources for the length of an operation: a descriptor closed under a running write could
        be another file's by the time the write reaches it."""
        with self._lock:
            if self._closed:
                raise StoreError(
                    "the store is closed",
                    path=self.path,
                    operation=operation,
                    offset=extent.offset,
                    nbytes=extent.nbytes,
                )
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            release = self._closed and not self._users
        if release:
            self._release()

    def _check(self, extent: Extent, buffer: memoryview | None) -> None:
        if extent.end > self.size:
            raise ValueError(f"{extent} reaches beyond the {self.size} bytes of the store")
        if buffer is not None and buffer.nbytes != extent.nbytes:
            raise ValueError(f"a buffer of {buffer.nbytes} bytes does not fit {extent}")
