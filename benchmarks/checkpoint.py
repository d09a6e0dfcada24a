"""Compare saving and resuming with Muon's state in host memory and on disk.

Each way is two runs of the same recipe: one saves after each of three steps and is ended after the step that
follows, one goes on from the last save and takes that step again. A checkpoint goes as soon as its save was
noted, so that a drive need not hold two of them. The raw bandwidth is measured after each way, with as
many reads to a write as a save has, and as a load has: a drive held to a rate in each direction lends nothing
of what one of them leaves over to the other.

    python benchmarks/checkpoint.py                  # 512 MiB of state, one CPU rank, about 2 minutes
    python benchmarks/checkpoint.py --recipe gpt_2b9 --directory /nvme/muon --ways host disk:0

One table: seconds that each save waited for write-back and wrote, the middle one of their sums as a ratio to
the first way and to what reading the state on disk and writing the checkpoint takes at the raw bandwidth; the
same of the load; by how much host memory grew at most in one rank; bytes of state files after the first and
after the last save; the raw bandwidth of a save and a load; and whether the resumed run's loss and gradient
norm are those of the run that went on.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import raw_mixed_gb_s, reports_of, steps_of, train_command
from limits import add_drive_option, steady_drive

from muon_offload_cli.checkpoints.names import SAVING, step_folder
from muon_offload_cli.records import RankReport

SAVES = 3
SMALL = (
    "launcher=one_rank",
    "parallel=data",
    "model=tiny_dense",
    "model.num_layers=4",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=4096",
    "train.sequence_length=16",
    "train.global_batch=1",
    "train.micro_batch=1",
    "offload.chunk_mb=64",
    "device=cpu",
)
"""Words that make recipe tiny a model of 60 M parameters: 512 MiB of state."""


@dataclass(kw_only=True)
class Result:
    """One way's figures; memory in bytes of the rank where it grew most."""

    way: str
    fault: str = ""
    saves: list[tuple[float, float]] = field(default_factory=list)
    state_files: list[int] = field(default_factory=list)
    checkpoint_bytes: int = 0
    save_growth: int = 0
    load_growth: int = 0
    load_s: float = 0.0
    same: bool = False
    raw_gb_s: tuple[float, float] = (1.0, 1.0)
    """Of the drive, with the state read and the checkpoint written, and the other way round."""

    @property
    def save_s(self) -> float:
        return statistics.median(flush + write for flush, write in self.saves)


def main() -> None:
    options = _options()
    results: list[Result] = []
    with (
        steady_drive(options.directory, options.drive_mb_s),
        tempfile.TemporaryDirectory(prefix="muon-bench-", dir=options.directory) as scratch,
    ):
        print(HEADER, flush=True)
        for way in options.ways:
            results.append(_measure(way, options, Path(scratch)))
            print(_line(results[-1], next((r for r in results if not r.fault), results[-1])), flush=True)
    print(f"recipe {options.recipe}, {' '.join(options.overrides)}")


HEADER = (
    f"{'way':<10} {'saves: flush+write s':<36} {'save s':>7} {'x first':>8} {'x raw':>6} {'load s':>7} "
    f"{'x first':>8} {'x raw':>6} {'save +MiB':>9} {'load +MiB':>9} "
    f"{'ckpt GB':>8} {'state files GB':>15} {'raw GB/s':>13}  same bits"
)


def _line(result: Result, first: Result) -> str:
    saves = ", ".join(f"{flush:.2f}+{write:.2f}" for flush, write in result.saves)
    if result.fault:
        return f"{result.way:<10} {saves:<36} {result.fault}"
    moved_gb = (result.state_files[-1] + result.checkpoint_bytes) / 1e9
    raw_save, raw_load = result.raw_gb_s
    files = " -> ".join(f"{nbytes / 1e9:.2f}" for nbytes in (result.state_files[0], result.state_files[-1]))
    return (
        f"{result.way:<10} {saves:<36} {result.save_s:7.2f} {result.save_s / first.save_s:8.2f} "
        f"{result.save_s / moved_gb * raw_save:6.2f} {result.load_s:7.2f} "
        f"{result.load_s / first.load_s:8.2f} {result.load_s / moved_gb * raw_load:6.2f} "
        f"{result.save_growth / 2**20:9.0f} {result.load_growth / 2**20:9.0f} "
        f"{result.checkpoint_bytes / 1e9:8.2f} {files:>15} {raw_save:6.4f} {raw_load:6.4f}  "
        f"{'yes' if result.same else 'NO'}"
    )


def _measure(way: str, options: argparse.Namespace, scratch: Path) -> Result:
    result = Result(way=way)
    saved, last = scratch / "saved", step_folder(scratch / "last", SAVES)
    names = {name: scratch / f"{name}_{way.replace(':', '_')}" for name in ("saving", "resumed")}
    steps = f"train.steps={SAVES + 1}"
    words = (steps, f"checkpoint.directory={saved}", "checkpoint.interval=1", "checkpoint.keep=1")
    command = train_command(options.recipe, options.overrides, way, names["saving"], *words)
    result.fault = _save(command, names["saving"], saved, last, result)
    if not result.fault:
        words = (steps, f"resume={last}")
        command = train_command(options.recipe, options.overrides, way, names["resumed"], *words)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            result.fault = f"resuming: exit {done.returncode}: {_last_line(done.stdout + done.stderr)}"
    if not result.fault:
        reports = reports_of(names["resumed"])
        result.load_s = max(report.load_s for report in reports)
        result.load_growth = max(report.load_memory_bytes for report in reports)
        ends = [steps_of(folder)[-1] for folder in names.values()]
        straight, resumed = ([(r.step, r.loss, r.grad_norm) for r in end] for end in ends)
        result.same = straight == resumed
    for folder in (saved, last.parent):
        shutil.rmtree(folder, ignore_errors=True)
    if not result.fault:
        state = result.state_files[-1] / (result.state_files[-1] + result.checkpoint_bytes)
        save, load = (raw_mixed_gb_s(scratch, options.raw_gib, share) for share in (state, 1 - state))
        result.raw_gb_s = save, load
    return result


def _save(command: list[str], folder: Path, saved: Path, last: Path, result: Result) -> str:
    """Run until the step after the last save is taken, then end the run; returns what went wrong."""
    last.parent.mkdir()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            while process.poll() is None and len(_quietly(steps_of, folder)) <= SAVES:
                time.sleep(0.05)
                reports = _quietly(reports_of, folder)
                if reports and min(report.saves for report in reports) > len(result.saves):
                    _note_save(reports, result)
                    if len(result.saves) < SAVES:
                        shutil.rmtree(step_folder(saved, reports[0].saved_step))
                    else:
                        # Out of reach of the save after the last step, which a fast drive ends in no time.
                        step_folder(saved, SAVES).rename(last)
        finally:
            # At once, whatever the save after the last step has come to: that one is not wanted.
            process.send_signal(signal.SIGINT)
            process.wait()
        shutil.rmtree(saved / SAVING, ignore_errors=True)
        if len(result.saves) == SAVES and len(steps_of(folder)) > SAVES:
            return ""
        output.seek(0)
        return f"saving: exit {process.returncode}: {_last_line(output.read())}"


def _quietly[T](read: Callable[[Path], list[T]], folder: Path) -> list[T]:
    """Read what ranks are writing; what is half there counts as not there."""
    with contextlib.suppress(ValueError, OSError):
        return read(folder)
    return []


def _note_save(reports: list[RankReport], result: Result) -> None:
    slowest = max(reports, key=lambda report: report.save_flush_s + report.save_write_s)
    result.saves.append((slowest.save_flush_s, slowest.save_write_s))
    result.state_files.append(sum(_unnamed_bytes(report.pid) for report in reports))
    result.checkpoint_bytes = reports[0].save_bytes
    result.save_growth = max(report.save_memory_bytes for report in reports)


def _unnamed_bytes(pid: int) -> int:
    """Return what files without a name that a process holds open take on their drive."""
    # By inode: a mapping holds a descriptor of its own.
    sizes: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "(deleted)" in str(entry.readlink()):
                sizes[entry.stat().st_ino] = entry.stat().st_blocks * 512
    return sum(sizes.values())


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="tiny", help="tiny is made larger, see SMALL")
    parser.add_argument("--ways", nargs="+", default=["host", "disk:auto", "disk:0"])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    add_drive_option(parser)
    parser.add_argument("--raw-gib", type=float, default=1.0, help="file size of the raw measurement")
    parser.add_argument("overrides", nargs="*", help="further key=value for the recipe")
    options = parser.parse_args()
    if options.recipe == "tiny":
        options.overrides = [*SMALL, *options.overrides]
    return options


if __name__ == "__main__":
    main()
