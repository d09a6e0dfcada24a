"""``muon-offload bench-disk``: what a drive moves with the engine's kind of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from muon_offload_cli.errors import Problem, UserError, command, does_not_fit, wrong

MODULE = "muon_offload_cli.storage.drive_probe"

LARGEST_PART = 10
"""The file takes at most one part in this many of what is free."""

SMALLEST_MIB = 64

SLACK = 0.1
"""What other threads must gain before they are advised: measurements differ by as much."""

_ELSEWHERE = "muon-offload bench-disk /a/folder/on/a/local/drive"


def bench_disk(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIRECTORY", help="A folder that exists on the drive, as offload.directory."),
    ],
    size_mb: Annotated[
        int, typer.Option("--size-mb", help=f"MiB of the file that is used, {SMALLEST_MIB} at least.")
    ] = 1024,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Of each measurement, 0.01 to 60; there are some forty.")
    ] = 0.3,
    json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Measure a drive: reads, writes and both at once, by request size and threads.

    The file has no name, so nothing is left behind, whatever happens. What is found is kept for disk-plan.
    """
    import json as text

    _check_ranges(size_mb, seconds)
    size = _checked(directory, size_mb)
    if size < size_mb:
        typer.echo(
            f"note: a file of {size} MiB is used, not of {size_mb}: a tenth of what is free in {directory}.",
            err=True,
        )
    lines = _run([str(directory), "--size-mib", str(size)], seconds)
    about, cases = lines[0], [line for line in lines if "way" in line]
    record, kept = _keep(directory, cases)
    choice = choose([case for case in cases if case["way"] == "both"])
    if json:
        found = {"about": about, "cases": cases, "choice": choice, "kept": record, "file": kept}
        typer.echo(text.dumps(found, indent=1))
        return
    _show(directory, about, cases)
    _tell(choice)
    rates = f"{record['read'] / 1e9:.2f} GB/s read and {record['written'] / 1e9:.2f} GB/s written at once"
    typer.echo(
        f"{rates}, {record['threads']} + {record['threads']} threads of 8 MiB"
        + (f"; kept in {kept}" * bool(kept))
    )


def choose(both: list[dict[str, Any]]) -> dict[str, Any]:
    """Choose request size and threads, and judge what the engine does without a choice by it.

    Args:
        both: Measurements of reads and writes at once.

    Returns:
        ``request_bytes`` and ``threads`` of the fastest, ``rate``, its bytes a second both ways together, and
        ``default``, what the engine's own request and threads make, as a part of that. ``io_threads``:
        threads that make more than a tenth more than the default ones with the engine's requests; None: there
        are none.
    """
    default = _default_of(both)
    best = max(both, key=_both_ways)
    same_request = [case for case in both if case["request_bytes"] == default["request_bytes"]]
    threads = max(same_request, key=_both_ways)
    worth_it = _both_ways(threads) * (1 - SLACK) > _both_ways(default)
    return {
        "request_bytes": best["request_bytes"],
        "threads": best["threads"],
        "rate": _both_ways(best),
        "default": _both_ways(default) / _both_ways(best) if _both_ways(best) else 1.0,
        "io_threads": threads["threads"] if worth_it else None,
    }


def _both_ways(case: dict[str, Any]) -> float:
    rate: float = case["read"] + case["written"]
    return rate


def _default_of(both: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the engine asks for, with 8 threads a direction; on a small file, the nearest there is."""
    from muon_offload_cli.units import PIECE_BYTES

    return min(both, key=lambda case: (abs(case["request_bytes"] - PIECE_BYTES), abs(case["threads"] - 8)))


def _tell(choice: dict[str, Any]) -> None:
    from muon_offload_cli.units import format_bytes

    request = format_bytes(choice["request_bytes"])
    typer.echo(
        f"fastest: {choice['threads']} + {choice['threads']} threads of {request}, "
        f"{choice['rate'] / 1e9:.2f} GB/s both ways together; the defaults make {choice['default']:.0%} of it"
    )
    if choice["io_threads"] is not None:
        typer.echo(
            f"offload.io_threads={choice['io_threads']} is faster by more than {SLACK:.0%}: worth setting"
        )


def _check_ranges(size_mb: int, seconds: float) -> None:
    problems = []
    if size_mb < SMALLEST_MIB:
        what = f"--size-mb {size_mb}: a file of less than {SMALLEST_MIB} MiB says little of a drive."
        problems.append(Problem(what=what, fix=f"--size-mb {SMALLEST_MIB}"))
    if not 0.01 <= seconds <= 60:
        problems.append(Problem(what=f"--seconds {seconds:g} is not from 0.01 to 60.", fix="--seconds 0.3"))
    if problems:
        raise UserError(problems=problems)


def _checked(directory: Path, size_mb: int) -> int:
    """Return the MiB of the file; refuses what is no folder on a drive, and a drive that is nearly full."""
    from muon_offload_cli.machine.filesystem import folder_fault, inspect
    from muon_offload_cli.units import MIB, format_bytes

    if not directory.is_absolute():
        raise wrong(
            f"{directory} is no absolute path.",
            command("muon-offload", "bench-disk", directory.absolute()),
        )
    try:
        mount = inspect(directory)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise wrong(f"{directory} cannot be looked at: {reason}.", _ELSEWHERE) from error
    if mount.is_memory:
        raise does_not_fit(
            f"{directory} is on {mount.mount_point} ({mount.kind}): memory, not a drive.", _ELSEWHERE
        )
    if fault := folder_fault(directory):
        # Its nearest parent may lie on another drive than the one that was meant.
        nearest = mount.existing if mount.existing.is_dir() else mount.existing.parent
        raise wrong(f"{directory}: {fault}.", command("muon-offload", "bench-disk", nearest))
    if not mount.writable:
        raise does_not_fit(f"{directory} is not writable by this user.", _ELSEWHERE)
    size = min(size_mb, mount.free_bytes // LARGEST_PART // MIB)
    if size < SMALLEST_MIB:
        raise does_not_fit(
            f"{mount.mount_point} has {format_bytes(mount.free_bytes)} free; at least "
            f"{format_bytes(SMALLEST_MIB * LARGEST_PART * MIB)} are wanted, so that the drive is not filled.",
            f"free some room, or {_ELSEWHERE}",
        )
    return size


def _run(arguments: list[str], seconds: float) -> list[dict[str, Any]]:
    """Run the probe in a process of its own: storage is the trainer's side."""
    import json as text
    import subprocess
    import sys

    command = [sys.executable, "-m", MODULE, *arguments, "--seconds", str(seconds)]
    lines: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                lines.append(text.loads(line))
        finally:
            process.terminate()
    if not lines or "done" not in lines[-1]:
        found = lines[-1].get("problems", []) if lines else []
        raise UserError(
            problems=[
                Problem(
                    what=problem["what"],
                    fix=problem.get("fix", ""),
                    exit_code=int(problem.get("exit_code", 3)),
                )
                for problem in found
            ]
            or [
                Problem(
                    what=f"the measurement ended early (exit code {process.returncode}).",
                    fix="see what it printed above",
                    exit_code=3,
                )
            ]
        )
    return lines


def _keep(directory: Path, cases: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Keep what was measured with the engine's own requests; returns the record and the file."""
    import socket
    from dataclasses import asdict
    from datetime import UTC, datetime

    from muon_offload_cli.machine.drives import DriveRecord, remember
    from muon_offload_cli.machine.filesystem import inspect

    default = _default_of([case for case in cases if case["way"] == "both"])
    record = DriveRecord(
        host=socket.gethostname(),
        mount_point=inspect(directory).mount_point,
        read=default["read"],
        written=default["written"],
        request_bytes=default["request_bytes"],
        threads=default["threads"],
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    try:
        return asdict(record), str(remember(record))
    except OSError:
        # A home that cannot be written to is no reason to lose the measurement.
        return asdict(record), ""


def _show(directory: Path, about: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    from muon_offload_cli.cli.table import print_table
    from muon_offload_cli.cli.train_view import make_console
    from muon_offload_cli.units import format_bytes

    console = make_console()
    how = (
        "direct I/O" if about["direct"] else "buffered I/O (O_DIRECT is refused here): mostly memory's speed"
    )
    console.print(f"{directory}: {how}, a file of {format_bytes(about['size'])}")
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for case in cases:
        found.setdefault((case["request_bytes"], case["threads"]), {})[case["way"]] = case
    rows = []
    for (request, threads), ways in found.items():
        rates = (
            ways["read"]["read"],
            ways["write"]["written"],
            ways["both"]["read"],
            ways["both"]["written"],
        )
        rows.append((format_bytes(request), str(threads), *(f"{rate / 1e9:.2f} GB/s" for rate in rates)))
    titles = ("request", "threads", "read", "write", "both: read", "both: write")
    print_table(console, titles, rows, numbers=len(titles))
