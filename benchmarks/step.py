"""Compare whole training steps with Muon's state on the device, in host memory and on disk.

Each way is one `muon-offload train` of the same recipe, data and steps, one after the other; raw drive
bandwidth (reads and writes at once, same kind of buffers) is measured between them. One table: seconds a step
(median without the first), ratio to resident, what stood still, what the drive did (as a ratio to raw while
any request was under way, and over whole steps), peaks, and whether losses and hashes of weights, masters and
momenta are the same bits.

    python benchmarks/step.py                                  # recipe tiny, CPU ranks, about 3 minutes
    python benchmarks/step.py --recipe gpt_2b9 --steps 6 --directory /nvme/muon
    python benchmarks/step.py --recipe gpt_2b9 --memory-max-gib 16 --ways mapped disk:auto disk:0

`--memory-max-gib` and `--drive-mb-s` need the right to make control groups (root). A drive held to less than
it can do is steady, so that bandwidths compare to a percent.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common import losses_of, raw_mixed_gb_s, reports_of, steps_of, train_command
from limits import add_drive_option, memory_limit, steady_drive

from muon_offload_cli.records import RankReport, StepRecord

IN_STAT = {"anon": "anon", "file": "file", "rss": "anon", "cache": "file"}
"""What memory.stat calls them, in either version."""
WAYS = ("none", "host", "mapped", "disk:auto", "disk:half", "disk:0")


@dataclass(kw_only=True)
class Result:
    """One way's figures."""

    way: str
    exit_code: int = 0
    steps: list[list[StepRecord]] = field(default_factory=list)
    reports: list[RankReport] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)
    last_line: str = ""

    @property
    def seconds(self) -> float:
        """Median over steps of the slowest rank's time, the first step left out."""
        return statistics.median(max(r.seconds for r in step) for step in self.steps[1:])

    def median(self, name: str) -> float:
        return statistics.median(sum(getattr(r, name) for r in step) for step in self.steps[1:])

    @property
    def moved(self) -> int:
        """Bytes read and written in the steady steps."""
        return sum(r.bytes_read + r.bytes_written for step in self.steps[1:] for r in step)

    @property
    def streaming_gb_s(self) -> float:
        """What moved, over the time in which any request was under way."""
        busy = sum(max(r.io_busy_s for r in step) for step in self.steps[1:])
        return self.moved / busy / 1e9 if busy else 0.0

    @property
    def whole_gb_s(self) -> float:
        """What moved, over all of the steady steps."""
        return self.moved / sum(max(r.seconds for r in step) for step in self.steps[1:]) / 1e9

    @property
    def losses(self) -> list[float | None]:
        return losses_of(self.steps)

    @property
    def digests(self) -> list[dict[str, str]]:
        return [report.digests for report in self.reports]


def main() -> None:
    options = _options()
    results: list[Result] = []
    raw: list[float] = []
    with (
        steady_drive(options.directory, options.drive_mb_s) as group,
        tempfile.TemporaryDirectory(prefix="muon-bench-", dir=options.directory) as scratch,
    ):
        for way in options.ways:
            raw.append(raw_mixed_gb_s(Path(scratch), options.raw_gib))
            results.append(_run(way, options, Path(scratch), results, group))
            print(_line(results[-1], results, raw), flush=True)
        raw.append(raw_mixed_gb_s(Path(scratch), options.raw_gib))
    print()
    print(HEADER)
    for result in results:
        print(_line(result, results, raw))
    limit = f", memory {options.memory_max_gib} GiB" if options.memory_max_gib else ""
    print(f"recipe {options.recipe}, {options.steps} steps, {' '.join(options.overrides)}{limit}")
    print("raw mixed bandwidth before, between and after (GB/s): " + " ".join(f"{r:.4g}" for r in raw))
    for result in results:
        if result.steps:
            print(f"losses {result.way}: {result.losses}")


HEADER = (
    f"{'way':<10} {'s/step':>8} {'x first':>8} {'stall s':>8} {'I/O GB/s':>9} {'x raw':>6} {'step':>6} "
    f"{'disk GB':>8} {'host GB':>8} {'GPU peak':>9} {'build':>7} {'anon':>7} {'file':>7}  same bits"
)


def _line(result: Result, results: list[Result], raw: list[float]) -> str:
    if result.exit_code or len(result.steps) < 2:
        return f"{result.way:<10} exit {result.exit_code}: {result.last_line}"
    first = next(r for r in results if len(r.steps) > 1)
    same = result.losses == first.losses and result.digests == first.digests
    streaming = result.streaming_gb_s
    disk = sum(report.disk_bytes for report in result.reports) / 1e9
    host = sum(report.host_bytes for report in result.reports) / 1e9
    peak = max(r.gpu_peak_bytes for r in result.steps[-1]) / 1e9
    build = max(report.build_gpu_peak_bytes for report in result.reports) / 1e9
    return (
        f"{result.way:<10} {result.seconds:8.3f} {result.seconds / first.seconds:8.2f} "
        f"{result.median('wait_s'):8.2f} {streaming:9.4g} {streaming / statistics.median(raw):6.3f} "
        f"{result.whole_gb_s / statistics.median(raw):6.3f} "
        f"{disk:8.2f} {host:8.2f} {peak:9.2f} {build:7.2f} {result.peaks.get('anon', 0):7.2f} "
        f"{result.peaks.get('file', 0):7.2f}  {'yes' if same else 'NO'}"
    )


def _run(
    way: str, options: argparse.Namespace, scratch: Path, earlier: list[Result], inside: Path | None
) -> Result:
    engine, _, budget = way.partition(":")
    folder = scratch / f"run_{way.replace(':', '_')}"
    priced = f"{engine}:{_budget_gb(budget, earlier)}" if budget else engine
    more = (f"train.steps={options.steps}", "run.digest=true")
    command = train_command(options.recipe, options.overrides, priced, folder, *more)
    result = Result(way=way)
    with memory_limit(options.memory_max_gib, inside) as group:

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=enter
        )
        try:
            with _watching(group, result.peaks):
                output, _ = process.communicate()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()
    result.exit_code = process.returncode
    result.last_line = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    result.reports, result.steps = reports_of(folder), steps_of(folder)
    return result


def _budget_gb(budget: str, earlier: list[Result]) -> str:
    """Return ``auto``, a number, or half of the state that an earlier way reported."""
    if budget != "half":
        return budget
    state = next((sum(report.muon_state_bytes for report in r.reports) for r in earlier if r.reports), 0)
    if not state:
        raise SystemExit("disk:half needs another way before it, to know the size of the state")
    return f"{state / 2 / 2**30:.4f}"


@contextmanager
def _watching(group: Path | None, peaks: dict[str, float]) -> Iterator[None]:
    """Sample the group's anonymous and file memory (GB) until the run ends."""
    stop = threading.Event()

    def watch() -> None:
        while group is not None and not stop.wait(0.2):
            for line in (group / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name in IN_STAT:
                    peaks[IN_STAT[name]] = max(peaks.get(IN_STAT[name], 0.0), int(value) / 1e9)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help=f"of {', '.join(WAYS)}, or disk:GIB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory-max-gib", type=float)
    add_drive_option(parser)
    parser.add_argument("--raw-gib", type=float, default=1.0, help="file size of the raw measurement")
    parser.add_argument("overrides", nargs="*", help="further key=value for the recipe")
    return parser.parse_args()


if __name__ == "__main__":
    main()
