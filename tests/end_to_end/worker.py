"""The worker with one fault in it, told by the environment variable ``FAULT``, a JSON object.

``rank`` is the rank that misbehaves. ``kind`` is ``read`` or ``write`` (the system call fails with EIO),
``short`` (reads come to an end half way), ``memory`` (the offloader is never attached), or ``chunks``
(they are cut half as large as those of the other ranks).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from muon_offload_cli.megatron import worker
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.system_calls import SYSTEM, SystemCalls
from tests.fakes.stores import failing_calls


def ending_reads(after: int) -> SystemCalls:
    """Return system calls of which reads, after `after` good ones, give half and then nothing."""
    count = itertools.count()

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        number = next(count)
        if number < after:
            return SYSTEM.preadv(fd, buffers, offset)
        half = buffers[0].nbytes // 2 // 4096 * 4096
        return SYSTEM.preadv(fd, [buffers[0][:half]], offset) if number == after and half else 0

    return replace(SYSTEM, preadv=preadv)


def misbehave(kind: str, after: int) -> None:
    """Put the fault in its place."""
    if kind == "memory":
        from muon_offload_cli.megatron import train

        train.install = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
        return
    if kind == "chunks":
        from muon_offload_cli.megatron import train

        settings = train.offload_settings
        train.offload_settings = lambda config: replace(  # type: ignore[assignment]
            settings(config), chunk_bytes=settings(config).chunk_bytes // 2
        )
        return
    calls = {
        "read": lambda: failing_calls("preadv", errno.EIO, after=after),
        "write": lambda: failing_calls("pwritev", errno.EIO, after=after),
        "short": lambda: ending_reads(after),
    }[kind]()

    from muon_offload_cli.offload import offloader

    class FaultyStore(DirectStore):
        def __init__(self, directory: Path, size: int, **more: Any) -> None:
            super().__init__(directory, size, **more | {"calls": calls})

    offloader.DirectStore = FaultyStore  # type: ignore[misc]


if __name__ == "__main__":
    fault = json.loads(os.environ.get("FAULT", "{}"))
    if fault and fault["rank"] == int(os.environ["RANK"]):
        misbehave(fault["kind"], fault.get("after", 0))
    code = worker.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
