"""Running a job: start it on its leash, follow it, end it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import psutil

from muon_offload_cli.launch.figures import RankFigures
from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.launch.follow import Event, Follower
from muon_offload_cli.launch.quiet import QuietWatch
from muon_offload_cli.launch.tail import Tail
from muon_offload_cli.records import RankReport

LEASH_MODULE = "muon_offload_cli.launch.leash"
FAILURE_MARK = "failed (exitcode:"  # torch/distributed/elastic/multiprocessing/api.py


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a job is given.

    Attributes:
        poll_s: Between two looks at the rank files.
        grace_s: Between SIGTERM and SIGKILL.
        last_word_s: Between the first sign of a dead rank and the end of the whole job by the
            launcher. Longer than torchrun's own 30 s, which normally settles it.
        quiet_s: Without a step before it is said which rank has not moved.
    """

    poll_s: float = 0.1
    grace_s: float = 10.0
    last_word_s: float = 45.0
    quiet_s: float = 60.0


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_code: Of torchrun; 128 + n if signal n ended it.
        interrupted_by: Number of the signal that a person or a scheduler sent to the launcher.
        gave_up: Whether the launcher ended a job that had failed and would not end.
        seconds: Wall time.
        figures: Per rank of this node.
        reports: Of the ranks that wrote one.
    """

    exit_code: int
    interrupted_by: int | None
    gave_up: bool
    seconds: float
    figures: dict[int, RankFigures]
    reports: dict[int, RankReport]


def run_job(
    command: Sequence[str],
    folder: RunFolder,
    ranks: Sequence[int],
    on_event: Callable[[Event], None],
    *,
    patience: Patience | None = None,
    saves_on_sigterm: bool = False,
    held: Sequence[int] = (),
) -> Outcome:
    """Run `command` to its end and report events as they are seen.

    SIGINT, SIGTERM and, unless it is ignored, SIGHUP to this process end the job (SIGTERM to every process of
    it, SIGKILL after the grace; a second signal ends the grace). With `saves_on_sigterm` a first SIGTERM is
    handed to the ranks alone, which save after their step and end by themselves, however long that takes; it
    ends the job like any other where none of them can be reached within the grace.
    Whatever happens, also an exception from `on_event` or SIGKILL to this process, no process of the job
    stays.

    Args:
        command: What to run, normally ``bash RUN/run.sh``; its output goes to the torchrun log.
        folder: The run's folder, already made.
        ranks: Global ranks that this node starts.
        on_event: Called on this thread.
        patience: Waiting times.
        saves_on_sigterm: The ranks take SIGTERM as a request to save and end.
        held: Descriptors that stay open until no process of the job is left, also if this one is killed.
    """
    patience = patience or Patience()
    follower = Follower(folder, ranks)
    quiet = QuietWatch(follower.figures, follower.reports, patience.quiet_s)
    watch = _FailureWatch(Tail(path=folder.torchrun_log), follower, patience.last_word_s)
    started = time.monotonic()
    gave_up = False
    with _signals_noted() as noted, folder.torchrun_log.open("ab") as log:
        leash = subprocess.Popen(
            [sys.executable, "-m", LEASH_MODULE, str(patience.grace_s), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=held,
        )
        try:
            warned: set[int] = set()
            reached_by = math.inf
            while leash.poll() is None and not gave_up:
                _drain(follower, on_event)
                for notice in quiet.look(time.monotonic()):
                    on_event(notice)
                if noted:
                    saves = saves_on_sigterm and noted.first == signal.SIGTERM and noted.count == 1
                    reached_by = min(reached_by, time.monotonic() + patience.grace_s)
                    if not saves or not _warn(leash, follower.reports, warned, reached_by):
                        break
                gave_up = watch.is_over(time.monotonic())
                time.sleep(patience.poll_s)
        finally:
            _end(leash, noted, patience)
        _drain(follower, on_event)
    return Outcome(
        exit_code=128 - leash.returncode if leash.returncode < 0 else leash.returncode,
        interrupted_by=noted.first,
        gave_up=gave_up,
        seconds=time.monotonic() - started,
        figures=follower.figures,
        reports=follower.reports,
    )


def _warn(
    leash: subprocess.Popen[bytes], reports: Mapping[int, RankReport], warned: set[int], reached_by: float
) -> bool:
    """Send SIGTERM to the ranks and not to torchrun, which would kill them 30 s later; False: none gets it.

    Only processes below the leash are signalled: a number in a report may be another process's by now. The
    way up from a rank is cut short where a process on it ends meanwhile, so this is called until each has its
    signal; a rank that reports later gets it then.

    Args:
        leash: Above all processes of the job.
        reports: Of the ranks.
        warned: Ranks' processes that have theirs; the others are added as they get it.
        reached_by: Until when the first of them may take to be found; seconds of `time.monotonic`.
    """
    pids = {report.pid for report in reports.values() if not report.finished} - warned
    for pid in sorted(pids):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            rank = psutil.Process(pid)
            if any(above.pid == leash.pid for above in rank.parents()):
                rank.terminate()
                warned.add(pid)
    return bool(warned or (pids and time.monotonic() < reached_by))


def _drain(follower: Follower, on_event: Callable[[Event], None]) -> None:
    for event in follower.poll():
        on_event(event)


class _Noted:
    """Signals that arrived, in order."""

    def __init__(self) -> None:
        self._signals: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._signals)

    @property
    def first(self) -> int | None:
        return self._signals[0] if self._signals else None

    @property
    def count(self) -> int:
        return len(self._signals)

    def handle(self, signum: int, _frame: FrameType | None) -> None:
        self._signals.append(signum)


@contextlib.contextmanager
def _signals_noted() -> Iterator[_Noted]:
    noted = _Noted()
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only, so there is nothing to note here.
        yield noted
        return
    ends = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # nohup: the run outlives its terminal.
        ends.remove(signal.SIGHUP)
    before = {signum: signal.signal(signum, noted.handle) for signum in ends}
    try:
        yield noted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _FailureWatch:
    """Notices a job in which a rank failed and which does not end by itself."""

    def __init__(self, torchrun_log: Tail, follower: Follower, last_word_s: float) -> None:
        self._log = torchrun_log
        self._follower = follower
        self._last_word_s = last_word_s
        self._failed_at: float | None = None

    def is_over(self, now: float) -> bool:
        if self._failed_at is None:
            marked = any(FAILURE_MARK in line for line in self._log.new_lines())
            if marked or any(report.error or report.problems for report in self._follower.reports.values()):
                self._failed_at = now
        return self._failed_at is not None and now - self._failed_at > self._last_word_s


def _end(leash: subprocess.Popen[bytes], noted: _Noted, patience: Patience) -> None:
    """Close the pipe and wait; ends the job by force if its leash does not."""
    if leash.stdin is not None:
        leash.stdin.close()
    deadline = time.monotonic() + patience.grace_s + 15
    hurried = False
    while leash.poll() is None:
        if noted.count > 1 and not hurried:
            leash.terminate()
            hurried = True
        late_s = time.monotonic() - deadline
        if late_s > 0:
            _kill_below(leash)
        if late_s > 15:
            # The last, since it alone finds those that a list of processes overlooks.
            leash.kill()
            leash.wait()
        time.sleep(min(0.05, patience.poll_s))


def _kill_below(leash: subprocess.Popen[bytes]) -> None:
    try:
        below = psutil.Process(leash.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
