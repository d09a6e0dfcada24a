"""Host memory of exact size, on huge pages where the kernel gives them, pinned on request."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np

from muon_offload_cli.errors import does_not_fit
from muon_offload_cli.storage.closing import Closing
from muon_offload_cli.storage.pinning import CudaPinner, Pinner
from muon_offload_cli.units import MIB, format_bytes, round_up

HUGE_PAGE = 2 * MIB


class HostBuffer(Closing):
    """Anonymous zeroed memory that direct I/O and the GPU's copy engines can both work on.

    Attributes:
        nbytes: Size in bytes, exactly as asked for.
        memory: Writable bytes of the buffer. Slices and `torch.frombuffer` tensors may be taken from it.
        address: First byte in this process; a multiple of 4096, of 2 MiB for buffers of at least that size.
        pinned: The memory is page-locked for CUDA.
        closed: The memory was given back.

    The memory does not survive a fork: a child that touches it gets a segmentation fault. Without that, a
    fork (a data loader's workers) during direct I/O or on pinned memory could leave the device writing to the
    child's copy (open(2), O_DIRECT notes), or copy every pinned page.
    """

    def __init__(self, nbytes: int, *, pin: bool = False, pinner: Pinner | None = None) -> None:
        """Map, and with `pin` page-lock, `nbytes` of memory.

        Args:
            nbytes: Size in bytes; zero is allowed (and is never pinned).
            pin: Page-lock it for CUDA; touches every page, so it takes about a second for 4 GB.
            pinner: What locks it; CUDA by default.

        Raises:
            UserError: There is not that much memory, or it cannot be pinned; figures in the text.
        """
        if nbytes < 0:
            raise ValueError(f"a buffer has no negative size: {nbytes}")
        self.nbytes = nbytes
        self.pinned = False
        self.closed = False
        self._pinner: Pinner = pinner or CudaPinner()
        self._map = _map_private(nbytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # A huge page begins at a multiple of its size; kernels before 6.7 do not align mappings for it.
        start = round_up(base, HUGE_PAGE) - base if nbytes >= HUGE_PAGE else 0
        self.address = base + start
        self.memory = memoryview(self._map)[start : start + nbytes]
        # Only whole huge pages inside the buffer: its last part stays on small pages, so that no memory is
        # taken beyond the size asked for. Kernels without huge pages refuse the advice: nothing is lost.
        huge_bytes = nbytes // HUGE_PAGE * HUGE_PAGE
        if huge_bytes:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
        self._map.madvise(mmap.MADV_DONTFORK)
        if pin and nbytes:
            try:
                self._pinner.register(self.address, nbytes)
            except BaseException:
                self.close()
                raise
            self.pinned = True

    def close(self) -> None:
        """Unpin the memory and give it back to the system at once; a second call does nothing.

        Slices and tensors that still exist stay readable but show zeros; the address range goes with the last
        of them. No copy to or from the buffer may be under way.
        """
        if self.closed:
            return
        self.closed = True
        if self.pinned:
            self.pinned = False
            self._pinner.unregister(self.address)
        self._map.madvise(mmap.MADV_DONTNEED)
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()


def _map_private(nbytes: int) -> mmap.mmap:
    slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    length = round_up(max(nbytes, 1), mmap.PAGESIZE) + slack
    try:
        # Private: a shared anonymous mapping is shmem, which gets no huge pages by default.
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise does_not_fit(
            f"{format_bytes(nbytes)} of host memory cannot be mapped: {error}.",
            "lower offload.host_memory_gb or offload.staging_mb, or raise the memory limit of this job",
            "offload.host_memory_gb",
        ) from error


def address_of(buffer: memoryview) -> int:
    """Return the address of the first byte of a contiguous buffer; 0 for an empty one."""
    return np.frombuffer(buffer, np.uint8).ctypes.data if buffer.nbytes else 0


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy all bytes; other threads run meanwhile, which they do not when slices are assigned."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
