"""Whether a directory keeps what is written to it: 16 MiB are written, read back and compared."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from pathlib import Path

from muon_offload_cli.machine.anonymous_file import enable_direct_io, open_anonymous
from muon_offload_cli.units import MIB, format_bytes

TEST_BYTES = 16 * MIB


def write_test(directory: Path, num_bytes: int = TEST_BYTES) -> str:
    """Write random bytes to a file without a name in an existing directory and read them back.

    Uses O_DIRECT where it is allowed, so that the drive answers and not the page cache.

    Args:
        directory: An existing directory.
        num_bytes: How much; a multiple of 4096.

    Returns:
        What went wrong, in words that follow a path; empty if the same bytes came back.
    """
    try:
        fd = open_anonymous(directory)
    except OSError as error:
        return f"no file can be made there ({error.strerror})"
    try:
        enable_direct_io(fd)
        with mmap.mmap(-1, num_bytes) as buffer:
            pattern = secrets.token_bytes(num_bytes)
            buffer[:] = pattern
            _whole(fd, buffer, num_bytes, write=True)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, num_bytes, os.POSIX_FADV_DONTNEED)
            buffer[:] = bytes(num_bytes)
            _whole(fd, buffer, num_bytes, write=False)
            if buffer[:] != pattern:
                return f"{format_bytes(num_bytes)} that were written came back changed"
    except OSError as error:
        if error.errno == errno.EFBIG:
            return ""  # A limit of this process (`machine.limits`), which no other folder lifts.
        return f"writing and reading {format_bytes(num_bytes)} failed ({error.strerror})"
    finally:
        os.close(fd)
    return ""


def _whole(fd: int, buffer: mmap.mmap, num_bytes: int, *, write: bool) -> None:
    """Move all bytes of `buffer`; a file that ends early leaves the rest as it was."""
    done = 0
    with memoryview(buffer) as whole:
        while done < num_bytes:
            with whole[done:] as rest:
                count = os.pwritev(fd, [rest], done) if write else os.preadv(fd, [rest], done)
            if count == 0:
                return
            done += count
