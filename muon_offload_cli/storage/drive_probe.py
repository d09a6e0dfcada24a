"""Measure a drive as the engine uses it: ``python -m muon_offload_cli.storage.drive_probe DIRECTORY``.

Prints one JSON object a line: first what is measured (``{"size": ..., "direct": ...}``), then one object a
case (``{"request_bytes", "threads", "way", "read", "written", "seconds"}``, rates in bytes a second), last
``{"done": true}``; or ``{"problems": [...]}`` where it cannot be done. The file has no name and its blocks
are reserved before anything is written, so that neither a full drive nor a kill leaves anything behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from muon_offload_cli.errors import UserError
from muon_offload_cli.storage.buffer import HostBuffer
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import StoreError
from muon_offload_cli.units import MIB, PIECE_BYTES

REQUESTS = (1 * MIB, 4 * MIB, PIECE_BYTES, 16 * MIB)
THREADS = (1, 4, 8, 16)
WAYS = ("read", "write", "both")

MOST_IN_FLIGHT = 128 * MIB
"""Bytes that one direction has in flight; larger products of threads and requests are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement; rates in bytes a second, 0 for the direction that was not asked for."""

    request_bytes: int
    threads: int
    way: str
    read: float
    written: float
    seconds: float


def measure(store: DirectStore, seconds: float, seed: int = 0) -> Iterator[Case]:
    """Yield one case after another, each about `seconds` long.

    Readers and writers have halves of the file of their own, at random places: the order of chunks
    alternates, so a drive's read-ahead is no help to the engine either.
    """
    largest = max(
        request * threads for request in REQUESTS for threads in THREADS if _allowed(request, threads)
    )
    with HostBuffer(2 * largest, pin=False) as buffer:
        # The first write to a page costs more than the copy that is to be measured; and zeros might be
        # compressed away on the drive.
        noise = os.urandom(MIB)
        for start in range(0, buffer.memory.nbytes, MIB):
            buffer.memory[start : start + MIB] = noise
        _fill(store, buffer.memory[: max(REQUESTS)])
        for request in REQUESTS:
            for threads in THREADS:
                if not _allowed(request, threads) or 2 * request > store.size:
                    continue
                for way in WAYS:
                    yield _run(store, buffer.memory, request, threads, way, seconds, seed)


def _allowed(request: int, threads: int) -> bool:
    return request * threads <= MOST_IN_FLIGHT


def _fill(store: DirectStore, data: memoryview) -> None:
    """Write every block once: reserved blocks read as zeros without touching the drive."""
    for offset in range(0, store.size, data.nbytes):
        size = min(data.nbytes, store.size - offset)
        store.write_from(Extent(offset, size), data[:size])


def _run(
    store: DirectStore,
    memory: memoryview,
    request: int,
    threads: int,
    way: str,
    seconds: float,
    seed: int,
) -> Case:
    directions = ["read", "write"] if way == "both" else [way]
    half = store.size // 2 // request
    ready = threading.Barrier(len(directions) * threads + 1)
    stop = threading.Event()

    def work(direction: str, number: int) -> int:
        chance = random.Random(f"{seed} {direction} {number}")
        slot = number + (threads if direction == "write" else 0)
        own = memory[slot * request : (slot + 1) * request]
        first = half if direction == "write" else 0
        moved = 0
        ready.wait()
        # Once at least: a thread may be given no time before the others have stopped.
        while not (moved and stop.is_set()):
            extent = Extent((first + chance.randrange(half)) * request, request)
            if direction == "read":
                store.read_into(extent, own)
            else:
                store.write_from(extent, own)
            moved += request
        return moved

    with ThreadPoolExecutor(len(directions) * threads) as pool:
        jobs = {
            direction: [pool.submit(work, direction, number) for number in range(threads)]
            for direction in directions
        }
        ready.wait()
        began = time.perf_counter()
        stop.wait(seconds)
        stop.set()
        totals = {direction: sum(job.result() for job in own) for direction, own in jobs.items()}
        elapsed = time.perf_counter() - began
    return Case(
        request_bytes=request,
        threads=threads,
        way=way,
        read=totals.get("read", 0) / elapsed,
        written=totals.get("write", 0) / elapsed,
        seconds=elapsed,
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.3)
    given = parser.parse_args(arguments)
    try:
        with DirectStore(given.directory, given.size_mib * MIB, owner="bench-disk") as store:
            _say({"size": store.size, "direct": store.direct})
            for case in measure(store, given.seconds):
                _say(asdict(case))
    except UserError as error:
        _say({"problems": [asdict(problem) for problem in error.problems]})
        return error.exit_code
    except StoreError as error:
        _say({"problems": [{"what": str(error), "fix": "", "exit_code": 3}]})
        return 3
    _say({"done": True})
    return 0


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
