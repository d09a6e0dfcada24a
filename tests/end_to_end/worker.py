"""The worker with one fault in it, told by the environment variable ``FAULT``, a JSON object.

``rank`` is the rank that misbehaves. ``kind`` is ``read`` or ``write`` (the system call fails with EIO),
``short`` (reads come to an end half way), ``memory`` (the offloader is never attached), or ``chunks``
(they are cut half as large as those of the other ranks). Two are no faults and hold for all ranks: with
``losses`` each micro-batch leaves the cross-entropies that it counts in ``folder``, and with ``adaptive``
Muon is adaptive Muon, in a form that can be stepped.
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


def tell_losses(folder: Path) -> None:
    """Append a JSON list a micro-batch to a file of this rank."""
    from muon_offload_cli.megatron.data import forward_step

    original, path = forward_step.loss_function, folder / f"losses_{os.environ['RANK']}.jsonl"

    def loss_function(mask: Any, output: Any) -> Any:
        with path.open("a") as stream:
            stream.write(json.dumps(output[mask > 0].detach().double().tolist()) + "\n")
        return original(mask, output)

    forward_step.loss_function = loss_function


def step_adaptively() -> None:
    """Let Megatron build adaptive Muon where Muon is asked for."""
    from megatron.core.optimizer import emerging_optimizers

    from tests.fakes.adaptive_muon import adaptive_muon_with_its_scale

    adaptive = adaptive_muon_with_its_scale()
    emerging_optimizers.TensorParallelAdaptiveMuon = adaptive
    emerging_optimizers._EMERGING_OPTIMIZERS["muon"].optimizer_cls = adaptive


def misbehave(kind: str, after: int) -> None:
    """Put the fault in its place."""
    if kind == "memory":
        from muon_offload_cli.megatron import train

        train.install = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
        return
    if kind == "chunks":
        from muon_offload_cli.megatron import train

        settings = train.offload_settings
        train.offload_settings = lambda *args, **more: replace(  # type: ignore[assignment]
            settings(*args, **more), chunk_bytes=settings(*args, **more).chunk_bytes // 2
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
    if fault.get("kind") == "losses":
        tell_losses(Path(fault["folder"]))
    elif fault.get("kind") == "adaptive":
        step_adaptively()
    elif fault and fault["rank"] == int(os.environ["RANK"]):
        misbehave(fault["kind"], fault.get("after", 0))
    code = worker.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
