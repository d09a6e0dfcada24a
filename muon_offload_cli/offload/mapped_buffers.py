"""Host tensors whose pages are a file's: one reserved file without a name a tensor, shared and writable."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from muon_offload_cli.machine.anonymous_file import remove_stale
from muon_offload_cli.storage.reserved_file import create_reserved
from muon_offload_cli.storage.store import StoreError, describe_errno
from muon_offload_cli.storage.system_calls import SYSTEM, SystemCalls

_MS_SYNC = 4  # <sys/mman.h> of Linux


class MappedBuffers:
    """Makes file-backed tensors for one owner, and knows those that still exist.

    A tensor owns its mapping, and the mapping its file: both go with the last reference, and nothing is left
    of a process that is killed. Descriptors are closed once mapped, so that thousands of tensors need none.

    Args:
        directory: Absolute folder on a drive; created if only its last part is missing, and kept until
            `close` is called.
        owner: Whose bytes these are, for error texts.
        calls: System calls to use.

    Raises:
        UserError: The directory cannot be used.
    """

    def __init__(self, directory: Path, *, owner: str, calls: SystemCalls = SYSTEM) -> None:
        self.directory = directory
        self._owner = owner
        self._calls = calls
        # Keeps the directory until these buffers are closed or dropped; tensors live on for themselves.
        anchor = create_reserved(directory, 0, False, owner=owner, calls=calls)
        self.close = weakref.finalize(self, anchor.close)
        remove_stale(directory)
        # Storages, not tensors: a loaded checkpoint hands the same bytes back as another tensor object.
        self._storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def new_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape and dtype in a file of its own, zero and contiguous.

        Its storage is exactly as large as it is: Megatron's checkpoint writer copies tensors that share a
        larger one. One without elements has a storage of one element, since nothing maps no bytes.

        Raises:
            UserError: The drive has no room for it; nothing was written.
            StoreError: The drive or the kernel reports another error.
        """
        nbytes = max(tensor.numel(), 1) * tensor.element_size()
        file = create_reserved(self.directory, nbytes, False, owner=self._owner, calls=self._calls)
        try:
            # The descriptor's own link: the file has no name to be opened by.
            path = f"/proc/{os.getpid()}/fd/{file.fd}"
            raw = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise StoreError(
                f"it cannot be mapped ({str(error).splitlines()[0]})",
                path=str(self.directory),
                operation="view",
                nbytes=nbytes,
            ) from error
        finally:
            file.close()
        self._storages[raw.data_ptr()] = raw.untyped_storage()
        return raw.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor`'s bytes are those of a buffer made here, whatever object shows them."""
        return tensor.untyped_storage().data_ptr() in self._storages

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that still exist."""
        return sum(storage.nbytes() for storage in list(self._storages.values()))

    def flush(self) -> int:
        """Wait until everything that was written to the tensors is on the drive; returns their bytes.

        Raises:
            StoreError: The drive reports an error.
        """
        library = ctypes.CDLL(None, use_errno=True)
        flushed = 0
        for storage in list(self._storages.values()):
            nbytes = storage.nbytes()
            if library.msync(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(nbytes), _MS_SYNC) != 0:
                error = OSError(ctypes.get_errno(), "")
                raise StoreError(
                    describe_errno(error),
                    path=str(self.directory),
                    operation="flush",
                    nbytes=nbytes,
                    errno=error.errno or 0,
                )
            flushed += nbytes
        return flushed
