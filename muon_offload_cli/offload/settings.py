"""What the offloader is told; the config's values in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.storage.extent import ALIGNMENT
from muon_offload_cli.units import MIB, PIECE_BYTES, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSettings:
    """Settings of one rank's offloader.

    Attributes:
        engine: ``host``, ``mapped`` or ``disk``.
        directories: Folders on node-local drives that this rank uses, its file striped over them if there
            are several; empty for ``host``.
        chunk_bytes: Budget of a chunk; 0: one chunk.
        fraction: Part of the state's bytes that leaves the device.
        host_bytes: Host memory of this rank that may hold state for good.
        windows: Chunks that have a place on the device at the same time.
        io_threads: Threads that read, and as many that write.
        staging_bytes: Staging buffers of this rank, reading and writing together.
        verify: ``off``, ``sample`` or ``full``: what of the file is compared with its checksum when read.
    """

    engine: str
    directories: tuple[Path, ...] = ()
    chunk_bytes: int = 512 * MIB
    fraction: float = 1.0
    host_bytes: int = 0
    windows: int = 3
    io_threads: int = 8
    staging_bytes: int = 192 * MIB
    verify: str = "off"

    def staging_rings(self, stored_bytes: int) -> tuple[int, int]:
        """Return buffers and bytes of each for one of the two staging rings, which read and write.

        Args:
            stored_bytes: Size of the store that they serve; more buffers than it has pieces are never used.
        """
        piece_bytes = round_up(min(PIECE_BYTES, self.chunk_bytes or PIECE_BYTES, stored_bytes), ALIGNMENT)
        return max(
            1, min(self.staging_bytes // piece_bytes // 2, -(-stored_bytes // piece_bytes))
        ), piece_bytes
