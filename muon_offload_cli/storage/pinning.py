"""Page-locking host memory for the GPU's copy engines; the only module of `storage` that imports torch."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from muon_offload_cli.errors import does_not_fit
from muon_offload_cli.units import format_bytes

_logger = logging.getLogger(__name__)


class Pinner(Protocol):
    """What locks memory and lets it go again."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock `nbytes` at `address`; raises `UserError` where that cannot be done."""

    def unregister(self, address: int) -> None:
        """Undo `register`; never raises, since the memory goes back to the system either way."""


class CudaPinner:
    """Locks memory of exact size with cudaHostRegister; torch's own allocator rounds up to powers of two."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock memory for the current CUDA context; see `Pinner`."""
        import torch

        if not torch.cuda.is_available():
            raise does_not_fit(
                f"{format_bytes(nbytes)} of host memory cannot be pinned: torch finds no CUDA device.",
                "device=cpu",
            )
        code = int(_cudart().cudaHostRegister(address, nbytes, 0))
        if code != 0:
            raise does_not_fit(
                f"pinning {format_bytes(nbytes)} of host memory failed: CUDA error {code}, {_name(code)}.",
                "lower offload.host_memory_gb or offload.staging_mb, or raise the memory limit of this job",
                "offload.host_memory_gb",
            )

    def unregister(self, address: int) -> None:
        """Unlock memory; see `Pinner`."""
        code = int(_cudart().cudaHostUnregister(address))
        if code != 0:
            # A CUDA context that died of an earlier error reports that error here too; raising would hide
            # the first one.
            _logger.warning("cudaHostUnregister(%#x): CUDA error %d, %s", address, code, _name(code))


def _cudart() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


def _name(code: int) -> str:
    cudart = _cudart()
    return str(cudart.cudaGetErrorString(cudart.cudaError(code)))
