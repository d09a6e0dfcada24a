"""A store whose bytes are meant to be used through a shared mapping of its file."""

from __future__ import annotations

from pathlib import Path

from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.file_store import FileStore
from muon_offload_cli.storage.system_calls import SYSTEM, SystemCalls


class MappedStore(FileStore):
    """Keeps its bytes in a file behind the page cache; its views may be written.

    `read_into` and `write_from` go through the page cache with pread and pwrite, which see the same pages as
    the mapping does, release the interpreter lock, and report a bad drive as an error instead of a SIGBUS.
    """

    def __init__(
        self, directory: Path, size: int, *, owner: str = "this rank", calls: SystemCalls = SYSTEM
    ) -> None:
        """Reserve `size` bytes in `directory` and map them; raises as `create_reserved` does."""
        super().__init__(directory, size, direct=False, owner=owner, calls=calls)
        try:
            self._view(Extent(0, 0))
        except BaseException:
            self.close()
            raise
