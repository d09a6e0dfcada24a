"""Compare a store's bandwidth with the drive's own, reads and writes at once.

Raw: threads call preadv and pwritev on the store's file, each with its own buffer. Store: as many threads
take slots of a staging ring and go through `read_into` and `write_from`. Same file, same kind of buffers (on
huge pages), same requests, alternating rounds, so that a drive that changes its mood changes it for both.

With a share of reads other than half, the direction with more to move goes on alone at the end.

    python benchmarks/store.py --directory /mnt/nvme0/bench --gib 1 --rounds 5
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from limits import add_drive_option, steady_drive

from muon_offload_cli.storage.buffer import HostBuffer
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent, lay_out
from muon_offload_cli.storage.mapped import MappedStore
from muon_offload_cli.storage.memory import MemoryStore
from muon_offload_cli.storage.ring import StagingRing
from muon_offload_cli.storage.store import Store
from muon_offload_cli.units import GIB, MIB, format_bytes

Move = Callable[[str, Extent, int], None]


def main() -> None:
    options = _options()
    with steady_drive(options.directory, options.drive_mb_s):
        _compare(options)


def _compare(options: argparse.Namespace) -> None:
    threads, request = options.threads, int(options.request_mib * MIB)
    size = int(options.gib * GIB)
    extents = lay_out([request] * max(2, size // request))
    figures: dict[str, list[float]] = {}
    with (
        DirectStore(options.directory, extents[-1].end) as store,
        StagingRing(2 * threads, request, options.pin) as ring,
        HostBuffer(2 * threads * request, pin=options.pin) as own,
    ):
        buffers = [own.memory[index * request : (index + 1) * request] for index in range(2 * threads)]
        move = {"raw": _raw(store, buffers), "store": _through(store, ring)}
        # Every block and buffer is touched before anything is timed: the first write to either costs more.
        slots = [ring.acquire() for _ in range(ring.slots)]
        for slot in slots:
            slot.memory[:] = bytes(request)
            ring.release(slot)
        for warm in move.values():
            _round(warm, extents, extents, threads)
        before = _footprint()
        cut = round(len(extents) * options.read_share)
        for number in range(options.rounds):
            order = extents[::-1] if number % 2 else extents
            reads, writes = order[:cut], order[cut:]
            for name in ("raw", "store") if number % 2 else ("store", "raw"):
                seconds = _round(move[name], reads, writes, threads)
                figures.setdefault(name, []).append((len(reads) + len(writes)) * request / seconds)
        after = _footprint()
        print(f"{options.directory}: direct={store.direct}, {format_bytes(store.size)}, pinned={ring.pinned}")
        print(f"{threads} readers + {threads} writers of {format_bytes(request)}, {options.rounds} rounds")
    if options.others:
        for name, other in _others(options.directory, extents[-1].end):
            with other, StagingRing(2 * threads, request, options.pin) as ring:
                through = _through(other, ring)
                _round(through, extents, extents, threads)
                for _ in range(options.rounds):
                    seconds = _round(through, extents[:cut], extents[cut:], threads)
                    figures.setdefault(name, []).append(len(extents) * request / seconds)
    raw = statistics.median(figures["raw"])
    print(f"{'way':<8} {'GB/s':>7} {'least':>7} {'most':>7} {'x raw':>6}")
    for name, rates in figures.items():
        median = statistics.median(rates)
        gb = [rate / 1e9 for rate in (median, min(rates), max(rates))]
        print(f"{name:<8} {gb[0]:7.4g} {gb[1]:7.4g} {gb[2]:7.4g} {median / raw:6.3f}")
    names = ("descriptors", "mappings", "resident")
    print(
        "growth over the rounds: "
        + ", ".join(f"{n} {b - a:+d}" for n, a, b in zip(names, before, after, strict=True))
    )


def _raw(store: DirectStore, buffers: list[memoryview]) -> Move:
    def move(operation: str, extent: Extent, thread: int) -> None:
        call = os.preadv if operation == "read" else os.pwritev
        moved = call(store.fd, [buffers[thread]], extent.offset)
        if moved != extent.nbytes:
            raise RuntimeError(f"a short {operation}: {moved} of {extent.nbytes} bytes")

    return move


def _through(store: Store, ring: StagingRing) -> Move:
    def move(operation: str, extent: Extent, thread: int) -> None:
        slot = ring.acquire()
        try:
            (store.read_into if operation == "read" else store.write_from)(extent, slot.memory)
        finally:
            ring.release(slot)

    return move


def _round(move: Move, reads: list[Extent], writes: list[Extent], threads: int) -> float:
    """Read and write at once; return the seconds until both are done."""
    ready = threading.Barrier(2 * threads + 1)
    queues = {"read": iter(reads), "write": iter(writes)}
    locks = {name: threading.Lock() for name in queues}

    def work(operation: str, thread: int) -> None:
        ready.wait()
        while True:
            with locks[operation]:
                extent = next(queues[operation], None)
            if extent is None:
                return
            move(operation, extent, thread)

    with ThreadPoolExecutor(2 * threads) as pool:
        jobs = [
            pool.submit(work, operation, index)
            for index, operation in enumerate(itertools.islice(itertools.cycle(queues), 2 * threads))
        ]
        ready.wait()
        began = time.perf_counter()
        for job in jobs:
            job.result()
        return time.perf_counter() - began


def _others(directory: Path, size: int) -> list[tuple[str, Store]]:
    return [("mapped", MappedStore(directory, size)), ("memory", MemoryStore(size, False))]


def _footprint() -> tuple[int, int, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return len(list(Path("/proc/self/fd").iterdir())), mappings, resident


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, required=True, help="absolute folder on the drive to measure"
    )
    parser.add_argument(
        "--gib", type=float, default=1.0, help="size of the file; a part is read, the rest written"
    )
    parser.add_argument("--read-share", type=float, default=0.5, help="part that is read")
    add_drive_option(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8, help="readers, and as many writers")
    parser.add_argument("--request-mib", type=float, default=8.0)
    parser.add_argument("--pin", action="store_true", help="page-lock the buffers for CUDA")
    parser.add_argument("--others", action="store_true", help="measure the mapped and the memory store too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
