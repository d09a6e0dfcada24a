"""The system calls that stores make, as values, so that a test can pass failing ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muon_offload_cli.machine.anonymous_file import enable_direct_io


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemCalls:
    """What stores ask of the system, mostly `os` functions of the same name; each raises OSError as they do.

    Attributes:
        preadv: Read at an offset into buffers; returns the bytes read.
        pwritev: Write buffers at an offset; returns the bytes written.
        fdatasync: Wait until a file's bytes are on its drive.
        posix_fallocate: Reserve the blocks of a byte range.
        enable_direct_io: Switch O_DIRECT on where the filesystem does it; see `machine.anonymous_file`.
        monotonic: Seconds on a clock that never goes back.
    """

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    fdatasync: Callable[[int], None] = os.fdatasync
    posix_fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    enable_direct_io: Callable[[int], bool] = enable_direct_io
    monotonic: Callable[[], float] = time.monotonic


SYSTEM = SystemCalls()
