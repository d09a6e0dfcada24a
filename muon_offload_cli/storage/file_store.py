"""What the stores on a drive share: one reserved file, whole reads and writes, one mapping."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from muon_offload_cli.storage.extent import ALIGNMENT, Extent
from muon_offload_cli.storage.lazy_map import LazyMap
from muon_offload_cli.storage.reserved_file import create_reserved
from muon_offload_cli.storage.store import Store, StoreError, describe_errno
from muon_offload_cli.storage.system_calls import SystemCalls
from muon_offload_cli.units import format_bytes


class FileStore(Store):
    """Bytes in one reserved file without a name.

    The mapping covers the whole file and is made once, so that the number of mappings does not grow with the
    number of views. Touching a view whose byte range has been cut off the file is a SIGBUS that no program
    can catch sensibly; the blocks are reserved for that reason, and the file has no name by which to cut it.
    """

    def __init__(self, directory: Path, size: int, *, direct: bool, owner: str, calls: SystemCalls) -> None:
        self._calls = calls
        self._file = create_reserved(directory, size, direct, owner=owner, calls=calls)
        self._map = LazyMap()
        super().__init__(size=size, path=str(directory), on_disk=True, direct=self._file.direct)

    @property
    def fd(self) -> int:
        """Descriptor of the file, for diagnostics; the store owns it."""
        return self._file.fd

    def drop_cache(self) -> None:
        """Take the file's pages out of this process and, clean as they are after `flush`, out of memory."""
        with self._using("flush", Extent(0, 0)):
            self._map.drop_pages()
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _read(self, extent: Extent, target: memoryview) -> None:
        self._transfer("read", self._calls.preadv, extent, target)

    def _write(self, extent: Extent, source: memoryview) -> None:
        self._transfer("write", self._calls.pwritev, extent, source)

    def _transfer(
        self,
        operation: str,
        call: Callable[[int, Sequence[memoryview], int], int],
        extent: Extent,
        buffer: memoryview,
    ) -> None:
        """Repeat `call` until the whole extent has moved.

        A short direct transfer may end at a place where direct I/O cannot begin: the next one then begins at
        the last aligned byte before it. A second attempt that comes no further than the first is an error.
        """
        data = buffer.cast("B")
        step = ALIGNMENT if self.direct else 1
        done, stalled = 0, False
        file_size = os.fstat(self._file.fd).st_size
        if file_size < self._file.size:
            # Told before a write makes the file long again, with zeros where bytes were.
            raise self._error(
                f"the file was cut behind our back: {file_size} of {self._file.size} bytes are left",
                operation,
                extent,
            )
        while done < extent.nbytes:
            began = self._calls.monotonic()
            try:
                count = call(self._file.fd, [data[done:]], extent.offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._error(describe_errno(error), operation, extent, error.errno or 0) from error
            # Two threads may write this at once, and the smaller figure may win: it is only looked at.
            self.slowest_s = max(self.slowest_s, self._calls.monotonic() - began)
            moved = done + count
            if moved == extent.nbytes:
                return
            progress = moved // step * step - done
            if count == 0 or (progress <= 0 and stalled):
                reason = "the file ends there" if operation == "read" else "the drive takes no more bytes"
                raise self._error(
                    f"{reason}: {format_bytes(moved)} of {format_bytes(extent.nbytes)} moved "
                    f"(file size {os.fstat(self._file.fd).st_size})",
                    operation,
                    extent,
                )
            stalled = progress <= 0
            done += max(progress, 0)

    def _view(self, extent: Extent) -> memoryview:
        return self._map.view(extent, self._map_file)

    def _map_file(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._file.fd, self._file.size, flags=mmap.MAP_SHARED)
        except OSError as error:
            whole = Extent(0, self._file.size)
            raise self._error(describe_errno(error), "view", whole, error.errno or 0) from error

    def _flush(self) -> None:
        # Also writes what was changed through the mapping: Linux syncs a file's pages, whoever dirtied them.
        try:
            self._calls.fdatasync(self._file.fd)
        except OSError as error:
            raise self._error(describe_errno(error), "flush", Extent(0, 0), error.errno or 0) from error

    def _release(self) -> None:
        self._map.close()
        self._file.close()

    def _error(self, reason: str, operation: str, extent: Extent, errno: int = 0) -> StoreError:
        return StoreError(
            reason,
            path=self.path,
            operation=operation,
            offset=extent.offset,
            nbytes=extent.nbytes,
            errno=errno,
        )
