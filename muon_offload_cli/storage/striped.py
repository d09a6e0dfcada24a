"""One store over several directories, so that every request of a rank finds all drives at work."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.file_store import FileStore
from muon_offload_cli.storage.lazy_map import LazyMap
from muon_offload_cli.storage.store import Store, StoreError, describe_errno
from muon_offload_cli.storage.stripes import Stripes

# Linux on every architecture that CUDA runs on; Python 3.12 has no names for them.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

type OpenPart = Callable[[Path, int], FileStore]


class StripedStore(Store):
    """Spreads its bytes in stripes over a file in each of several directories.

    A request that crosses the edge of a stripe becomes one request a stripe, one after another; it is the
    many requests under way that keep all drives busy. An error names the directory that it came from. The
    slowest drive sets the pace, since all get the same share.

    Args:
        directories: Where the files lie, in order; not empty.
        size: Bytes of all together.
        open_part: Opens the file of one directory, such as `DirectStore`.

    Raises:
        UserError: A directory cannot be used or has no room; the files of the others are gone again.
        StoreError: A drive reports an error.
    """

    def __init__(self, directories: Sequence[Path], size: int, open_part: OpenPart) -> None:
        self._stripes = Stripes(size=size, files=len(directories))
        self._map = LazyMap()
        with contextlib.ExitStack() as opened:
            self._parts: list[FileStore] = [
                opened.enter_context(open_part(directory, nbytes))
                for directory, nbytes in zip(directories, self._stripes.file_bytes(), strict=True)
            ]
            opened.pop_all()
        super().__init__(
            size=size,
            path=", ".join(part.path for part in self._parts),
            on_disk=True,
            direct=all(part.direct for part in self._parts),
        )

    @property
    def parts(self) -> Sequence[Store]:
        """The store of each directory."""
        return self._parts

    def drop_cache(self) -> None:
        """Take all files' pages out of this process and, clean as they are after `flush`, out of memory."""
        with self._using("flush", Extent(0, 0)):
            self._map.drop_pages()
            for part in self._parts:
                part.drop_cache()

    def _read(self, extent: Extent, target: memoryview) -> None:
        data = target.cast("B")
        for file, part, start in self._stripes.parts(extent):
            self._parts[file].read_into(part, data[start : start + part.nbytes])

    def _write(self, extent: Extent, source: memoryview) -> None:
        data = source.cast("B")
        for file, part, start in self._stripes.parts(extent):
            self._parts[file].write_from(part, data[start : start + part.nbytes])

    def _view(self, extent: Extent) -> memoryview:
        return self._map.view(extent, self._map_stripes)

    def _map_stripes(self) -> mmap.mmap:
        """Map stripe after stripe over one range of addresses, so that a tensor across them is one view."""
        # Only a range of addresses: without MAP_NORESERVE, the kernel would want memory for it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            area = mmap.mmap(-1, max(self.size, mmap.PAGESIZE), flags=flags)
        except OSError as error:
            raise self._no_view(self.path, error.errno or 0) from error
        base = ctypes.addressof(ctypes.c_char.from_buffer(area))
        for file, part, start in self._stripes.parts(Extent(0, self.size)):
            code = _map_over(base + start, part, self._parts[file].fd)
            if code:
                area.close()
                raise self._no_view(self._parts[file].path, code)
        return area

    def _no_view(self, path: str, code: int) -> StoreError:
        reason = describe_errno(OSError(code, os.strerror(code)))
        return StoreError(reason, path=path, operation="view", nbytes=self.size, errno=code)

    def _flush(self) -> None:
        for part in self._parts:
            part.flush()

    def _release(self) -> None:
        self._map.close()
        with contextlib.ExitStack() as closing:
            for part in self._parts:
                closing.callback(part.close)


def _map_over(address: int, extent: Extent, fd: int) -> int:
    """Put a shared mapping of a file in the place of mapped addresses; returns errno, 0 if it worked.

    Python's mmap takes no address. The range stays the `mmap` object's own, which unmaps all of it at once.
    """
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    flags = mmap.MAP_SHARED | _MAP_FIXED
    found = call(address, extent.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, extent.offset)
    return 0 if found == address else ctypes.get_errno() or errno.EINVAL
