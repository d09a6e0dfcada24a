"""The system calls that stores make, as values, so that a test can pass failing ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemCalls:
    """The calls of `os` with the same names; each raises OSError as they do.

    Attributes:
        preadv: Read at an offset into buffers; returns the bytes read.
        pwritev: Write buffers at an offset; returns the bytes written.
        fdatasync: Wait until a file's bytes are on its drive.
        posix_fallocate: Reserve the blocks of a byte range.
    """

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    fdatasync: Callable[[int], None] = os.fdatasync
    posix_fallocate: Callable[[int, int, int], None] = os.posix_fallocate


SYSTEM = SystemCalls()
