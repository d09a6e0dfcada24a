"""A store in host memory, pinned on request: the fastest tier beside the GPU."""

from __future__ import annotations

from muon_offload_cli.storage.buffer import HostBuffer, copy_bytes
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.pinning import Pinner
from muon_offload_cli.storage.store import Store


class MemoryStore(Store):
    """Holds its bytes in one `HostBuffer`; its views are the bytes themselves and may be written."""

    def __init__(self, size: int, pin: bool, *, pinner: Pinner | None = None) -> None:
        """Take (and with `pin` page-lock) `size` bytes; raises `UserError` as `HostBuffer` does."""
        self._buffer = HostBuffer(size, pin=pin, pinner=pinner)
        super().__init__(size=size, path="", on_disk=False, direct=False)

    @property
    def pinned(self) -> bool:
        """The memory is page-locked."""
        return self._buffer.pinned

    def _read(self, extent: Extent, target: memoryview) -> None:
        copy_bytes(target, self._view(extent))

    def _write(self, extent: Extent, source: memoryview) -> None:
        copy_bytes(self._view(extent), source)

    def _view(self, extent: Extent) -> memoryview:
        return self._buffer.memory[extent.offset : extent.end]

    def _flush(self) -> None:
        """Nothing to wait for."""

    def _release(self) -> None:
        self._buffer.close()
