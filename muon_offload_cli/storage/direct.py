"""A store that passes the page cache by: the drive's own speed under any memory limit."""

from __future__ import annotations

from pathlib import Path

from muon_offload_cli.storage.buffer import address_of
from muon_offload_cli.storage.extent import ALIGNMENT, Extent
from muon_offload_cli.storage.file_store import FileStore
from muon_offload_cli.storage.system_calls import SYSTEM, SystemCalls


class DirectStore(FileStore):
    """Keeps its bytes in a file that is read and written with O_DIRECT.

    Where the filesystem refuses O_DIRECT, `direct` is false and I/O is buffered. Extents and buffers must be
    aligned to 4096 either way, so that a program does not work on one filesystem only.

    Views show the file through the page cache and must not be written: the kernel drops a cached page when a
    direct write reaches it, and a write through the view would race with that. What a view touched stays in
    the page cache, where the kernel may reclaim it.
    """

    def __init__(
        self, directory: Path, size: int, *, owner: str = "this rank", calls: SystemCalls = SYSTEM
    ) -> None:
        """Reserve `size` bytes in `directory`; raises as `create_reserved` does."""
        super().__init__(directory, size, direct=True, owner=owner, calls=calls)

    def _check(self, extent: Extent, buffer: memoryview | None) -> None:
        super()._check(extent, buffer)
        if buffer is None:
            return
        if extent.offset % ALIGNMENT or extent.nbytes % ALIGNMENT:
            raise ValueError(f"{extent} is not aligned to {ALIGNMENT}, which direct I/O needs")
        address = address_of(buffer)
        if address % ALIGNMENT:
            raise ValueError(
                f"a buffer at {address:#x} is not aligned to {ALIGNMENT}, which direct I/O needs"
            )
