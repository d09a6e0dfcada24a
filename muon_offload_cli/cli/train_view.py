"""What ``train`` shows: the plan, the live line, the table, the verdict, the post-mortem."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from muon_offload_cli.cli.table import print_table
from muon_offload_cli.errors import visible
from muon_offload_cli.launch.figures import StepSeen
from muon_offload_cli.launch.follow import Event, RankReported
from muon_offload_cli.launch.post_mortem import PostMortem
from muon_offload_cli.launch.quiet import Quiet
from muon_offload_cli.launch.verdict import Verdict
from muon_offload_cli.units import format_bytes

PIPE_WIDTH = 1000
ROOMY_CELLS = 120


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that never wraps or re-interprets text: paths and fixes are there to be pasted."""
    console = Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        # Rich takes a pipe for 80 columns wide and cuts the cells of a table to fit.
        console.width = PIPE_WIDTH
    return console


class TrainView:
    """Draws one run on one console; in a pipe, plain lines.

    Args:
        console: Where to draw.
        total_steps: Steps of the run.
    """

    def __init__(self, console: Console, *, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._said: set[str] = set()
        self._attached: set[int] = set()
        self._saved = 0

    def plan(self, lines: Sequence[tuple[str, str]]) -> None:
        """Show what will be done."""
        width = max(len(label) for label, _ in lines)
        for label, text in lines:
            self._console.print(Text.assemble((f"{label:<{width}}  ", "bold"), visible(text)))

    @contextmanager
    def live(self) -> Iterator[None]:
        """Draw a bar while the block runs, if this is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        # Where there is little room, figures go before bar and time, and wrap rather than being cut.
        roomy = self._console.width >= ROOMY_CELLS
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            *([BarColumn(bar_width=20)] if roomy else []),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=False)),
            *([TimeRemainingColumn()] if roomy else []),
            console=self._console,
        )
        with self._progress:
            self._task = self._progress.add_task("starting", total=self._total)
            yield

    def see(self, event: Event) -> None:
        """Draw one event of the job."""
        match event:
            case StepSeen():
                self._step(event)
            case RankReported():
                self._rank(event)
            case Quiet():
                self.line(str(event))

    def _step(self, step: StepSeen) -> None:
        text = figures_of(step)
        if self._progress is None or self._task is None:
            self._console.print(f"step {step.step}/{self._total}  {text}")
        else:
            self._progress.update(self._task, completed=step.step, description=text)

    def _rank(self, event: RankReported) -> None:
        report = event.report
        if report.muon_state_bytes and report.rank not in self._attached:
            self._attached.add(report.rank)
            self._console.print(visible(f"rank {report.rank}: {attached_text(event)}"))
        if report.rank == 0 and report.saved_step > self._saved:
            self._saved = report.saved_step
            self._console.print(
                f"saved step {report.saved_step} ({format_bytes(report.save_bytes)}: "
                f"{report.save_flush_s:.1f} s of write-back, {report.save_write_s:.1f} s of writing)"
            )
        for note in report.notes:
            if note not in self._said:
                self._said.add(note)
                self._console.print(Text.assemble(("note: ", "bold blue"), visible(note)))

    def table(self, verdict: Verdict, engine: str) -> None:
        """Show one row a rank."""
        sizes = {
            "disk": "disk_bytes",
            "host": "host_bytes",
            "device": "gpu_bytes",
            "Adam (device)": "adam_state_bytes",
        }
        if any(row.adam_disk_bytes for row in verdict.ranks):
            sizes["Adam (disk)"] = "adam_disk_bytes"
        # Where all are in one place, the lines of the plan have said it.
        directories = {row.directory for row in verdict.ranks if row.directory}
        several = len(directories) > 1 or any(", " in text for text in directories)
        numbers = ("rank", *sizes, f"steps from {engine}")
        rows: list[list[str | Text]] = []
        for row in verdict.ranks:
            told = f"{row.verdict} ({row.detail})" if row.detail else row.verdict
            rows.append(
                [
                    str(row.rank),
                    *(format_bytes(size) if (size := getattr(row, name)) else "-" for name in sizes.values()),
                    f"{row.steps_from_backend}/{row.steps}",
                    *([visible(row.directory)] if several else []),
                    Text(visible(told), style="green" if row.fine else "bold red"),
                ]
            )
        titles = (*numbers, *(["directory"] if several else []), "verdict")
        print_table(self._console, titles, rows, numbers=len(numbers))

    def death(self, found: PostMortem) -> None:
        """Say why a job died."""
        self._console.print(Text.assemble(("error: ", "bold red"), visible(found.what)))
        if found.cause:
            self._console.print(Text.assemble(("  likely cause: ", "bold"), visible(found.cause)))
        if found.last_lines:
            self._console.print(Text("  last lines:", style="bold"))
            for line in found.last_lines:
                self._console.print(Text(f"  | {visible(line)}"))
        if found.log is not None:
            self._console.print(Text.assemble(("  log: ", "bold"), visible(str(found.log))))

    def headline(self, verdict: Verdict) -> None:
        """Show the verdict, the last line of a run."""
        self._console.print(
            Text(visible(verdict.headline), style="bold green" if verdict.success else "bold red")
        )

    def line(self, text: str) -> None:
        """Show one plain line."""
        self._console.print(Text(visible(text)))


def figures_of(step: StepSeen) -> str:
    """Write a step's figures; what no rank of this node knows is left out."""
    parts = []
    if step.loss is not None:
        parts.append(f"loss {step.loss:.4f}")
    if step.grad_norm is not None:
        parts.append(f"grad norm {step.grad_norm:.3f}")
    parts.append(f"{step.seconds:.2f} s")
    if step.read_bytes_per_s or step.write_bytes_per_s:
        parts.append(f"read {format_bytes(step.read_bytes_per_s)}/s")
        parts.append(f"write {format_bytes(step.write_bytes_per_s)}/s")
    return "  ".join(parts)


def attached_text(event: RankReported) -> str:
    """Say where a rank keeps its Muon state."""
    report = event.report
    places = [
        f"{format_bytes(size)} {where}"
        for size, where in (
            (report.disk_bytes, "on disk" + (", direct I/O" if report.direct_io else "")),
            (report.host_bytes, "in host memory"),
            (report.gpu_bytes, f"on the {'device' if report.device != 'cpu' else 'CPU device'}"),
        )
        if size
    ]
    chunks = f", {report.chunks} chunks" if report.chunks else ""
    return f"muon state {' and '.join(places) or format_bytes(report.muon_state_bytes)}{chunks}"
