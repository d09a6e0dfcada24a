"""Stores that misbehave on purpose, and system calls that do."""

from __future__ import annotations

import errno as errno_names
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import Store, StoreError
from muon_offload_cli.storage.system_calls import SYSTEM, SystemCalls


class WrappedStore(Store):
    """Passes everything on to another store, which it owns.

    Attributes:
        reads: Extents read so far, in the order in which the reads began.
        writes: The same for writes.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(size=inner.size, path=inner.path, on_disk=inner.on_disk, direct=inner.direct)
        self.inner = inner
        self.reads: list[Extent] = []
        self.writes: list[Extent] = []

    @property
    def parts(self) -> Sequence[Store]:
        return self.inner.parts

    def drop_cache(self) -> None:
        self.inner.drop_cache()

    def _read(self, extent: Extent, target: memoryview) -> None:
        self.reads.append(extent)
        self.inner.read_into(extent, target)

    def _write(self, extent: Extent, source: memoryview) -> None:
        self.writes.append(extent)
        self.inner.write_from(extent, source)

    def _view(self, extent: Extent) -> memoryview:
        return self.inner.view(extent)

    def _flush(self) -> None:
        self.inner.flush()

    def _release(self) -> None:
        self.inner.close()


class SlowStore(WrappedStore):
    """Takes `delay_s` longer for every read and write."""

    def __init__(self, inner: Store, delay_s: float) -> None:
        super().__init__(inner)
        self.delay_s = delay_s

    def _read(self, extent: Extent, target: memoryview) -> None:
        time.sleep(self.delay_s)
        super()._read(extent, target)

    def _write(self, extent: Extent, source: memoryview) -> None:
        time.sleep(self.delay_s)
        super()._write(extent, source)


class FailingStore(WrappedStore):
    """Raises StoreError on every read (or write) after the first `after` good ones."""

    def __init__(self, inner: Store, *, fail_on: str, after: int = 0, errno: int = errno_names.EIO) -> None:
        super().__init__(inner)
        self.fail_on = fail_on
        self.errno = errno
        self._left = after
        self._count_lock = threading.Lock()

    def _read(self, extent: Extent, target: memoryview) -> None:
        self._maybe_fail("read", extent)
        super()._read(extent, target)

    def _write(self, extent: Extent, source: memoryview) -> None:
        self._maybe_fail("write", extent)
        super()._write(extent, source)

    def _maybe_fail(self, operation: str, extent: Extent) -> None:
        if operation != self.fail_on:
            return
        with self._count_lock:
            self._left -= 1
            fails = self._left < 0
        if fails:
            raise StoreError(
                f"{errno_names.errorcode.get(self.errno, '?')} ({os.strerror(self.errno)})",
                path=self.path,
                operation=operation,
                offset=extent.offset,
                nbytes=extent.nbytes,
                errno=self.errno,
            )


class ShortStore(WrappedStore):
    """Behaves as a file that was cut behind our back: reads after the first `after` end half way."""

    def __init__(self, inner: Store, *, after: int = 0) -> None:
        super().__init__(inner)
        self._left = after
        self._count_lock = threading.Lock()

    def _read(self, extent: Extent, target: memoryview) -> None:
        with self._count_lock:
            self._left -= 1
            cut = self._left < 0
        super()._read(extent, target)
        if cut:
            target[target.nbytes // 2 :] = bytes(target.nbytes - target.nbytes // 2)
            raise StoreError(
                f"the file ends there: {target.nbytes // 2} of {extent.nbytes} bytes moved",
                path=self.path,
                operation="read",
                offset=extent.offset,
                nbytes=extent.nbytes,
            )


def failing_calls(name: str, errno: int, *, after: int = 0, calls: SystemCalls = SYSTEM) -> SystemCalls:
    """Return system calls of which `name` fails with `errno` after `after` good calls."""
    real = getattr(calls, name)
    count = itertools.count()

    def call(*arguments: object) -> object:
        if next(count) >= after:
            raise OSError(errno, os.strerror(errno))
        return real(*arguments)

    return replace(calls, **{name: call})


def short_calls(nbytes: int, *, calls: SystemCalls = SYSTEM) -> SystemCalls:
    """Return system calls that move at most `nbytes` a call (a multiple of 4096 for direct I/O)."""

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return calls.preadv(fd, [buffers[0][:nbytes]], offset)

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return calls.pwritev(fd, [buffers[0][:nbytes]], offset)

    return replace(calls, preadv=preadv, pwritev=pwritev)


def ragged_calls(missing: int, *, calls: SystemCalls = SYSTEM) -> SystemCalls:
    """Return system calls of which every other one reports `missing` bytes less than it moved."""
    count = itertools.count()

    def ragged(moved: int) -> int:
        return moved - missing if next(count) % 2 == 0 else moved

    return replace(
        calls,
        preadv=lambda fd, buffers, offset: ragged(calls.preadv(fd, buffers, offset)),
        pwritev=lambda fd, buffers, offset: ragged(calls.pwritev(fd, buffers, offset)),
    )


def interrupted_calls(*, calls: SystemCalls = SYSTEM) -> SystemCalls:
    """Return system calls of which every other one is interrupted by a signal before it moves a byte."""
    count = itertools.count()

    def interrupt() -> None:
        if next(count) % 2 == 0:
            raise InterruptedError(errno_names.EINTR, os.strerror(errno_names.EINTR))

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        interrupt()
        return calls.preadv(fd, buffers, offset)

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        interrupt()
        return calls.pwritev(fd, buffers, offset)

    def posix_fallocate(fd: int, offset: int, nbytes: int) -> None:
        interrupt()
        calls.posix_fallocate(fd, offset, nbytes)

    return replace(calls, preadv=preadv, pwritev=pwritev, posix_fallocate=posix_fallocate)


def buffered_calls(*, calls: SystemCalls = SYSTEM) -> SystemCalls:
    """Return the system calls of a filesystem that refuses O_DIRECT."""
    return replace(calls, enable_direct_io=lambda fd: False)


class FakePinner:
    """Pins nothing and remembers what it was asked for: address -> bytes of what is registered now."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]
