"""The real job runner over a stand-in torchrun."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_torchrun
import psutil
import pytest

from muon_offload_cli.launch.figures import StepSeen
from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.launch.follow import Event, RankReported
from muon_offload_cli.launch.job import LEASH_MODULE, Outcome, Patience, _kill_below, run_job
from muon_offload_cli.launch.quiet import Quiet
from muon_offload_cli.records import RankReport

QUICK = Patience(poll_s=0.02, grace_s=1.0, last_word_s=fake_torchrun.HANG_S)
HASTY = replace(QUICK, last_word_s=1.0)
"""For jobs that never end by themselves: others may need longer on a busy machine."""
STEPS = 3000
"""More than a job takes that is asked to end."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(root=tmp_path / "run")
    for sub in (made.logs, made.metrics, made.reports):
        sub.mkdir(parents=True)
    return made


def start(
    folder: RunFolder,
    plan: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    see: Callable[[Event], None] = lambda event: None,
    patience: Patience = QUICK,
    saves_on_sigterm: bool = False,
    **more: str,
) -> tuple[Outcome, list[Event]]:
    for key, value in fake_torchrun.environment(plan, **more).items():
        monkeypatch.setenv(key, value)
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        see(event)

    outcome = run_job(
        fake_torchrun.command(folder.root, 2),
        folder,
        range(2),
        on_event,
        patience=patience,
        saves_on_sigterm=saves_on_sigterm,
    )
    return outcome, events


def test_steps_are_merged_over_ranks_in_order(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, events = start(folder, {"steps": 3}, monkeypatch)
    steps = [event for event in events if isinstance(event, StepSeen)]
    assert outcome.exit_code == 0
    assert [step.step for step in steps] == [1, 2, 3]
    assert steps[1].loss == 2.5
    assert steps[1].seconds == pytest.approx(0.6)
    assert steps[1].read_bytes_per_s == pytest.approx(2 * (4 << 20) / 0.6)
    assert outcome.figures[1].steps_by_engine == {"disk": 3}


def test_half_written_lines_are_read_once_they_are_whole(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, events = start(folder, {"steps": 3, "ranks": {"1": {"half": True}}}, monkeypatch)
    assert [event.step for event in events if isinstance(event, StepSeen)] == [1, 2, 3]


def test_reports_are_told_as_they_change(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = folder.root / "seen"
    finished: list[bool] = []

    def see(event: Event) -> None:
        if isinstance(event, RankReported) and event.report.rank == 0:
            finished.append(event.report.finished)
            seen.touch()

    outcome, _ = start(folder, {"steps": 5, "ranks": {"0": {"until": str(seen)}}}, monkeypatch, see)
    assert finished[-2:] == [False, True]
    assert outcome.reports[0].steps == 5


def test_what_is_held_for_the_job_is_held_by_its_leash_and_by_no_rank(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in fake_torchrun.environment({"steps": 3}).items():
        monkeypatch.setenv(key, value)
    (folder.root / "lock").touch()
    holders: set[str] = set()

    def see(event: Event) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if Path(f"/proc/{process.pid}/fd/{lock.fileno()}").readlink() == folder.root / "lock":
                    holders.add(process.cmdline()[2])

    with (folder.root / "lock").open() as lock:
        command = fake_torchrun.command(folder.root, 2)
        run_job(command, folder, range(2), see, patience=QUICK, held=[lock.fileno()])
    assert holders == {LEASH_MODULE}


def test_a_killed_rank_ends_the_job_and_leaves_no_process(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"steps": 500, "ranks": {"1": {"die": signal.SIGKILL}, "0": {"child": True}}}
    outcome, _ = start(folder, plan, monkeypatch)
    assert outcome.exit_code == 1
    assert not outcome.gave_up
    assert fake_torchrun.processes_of(folder.root) == []


def test_a_job_that_failed_and_hangs_is_ended_by_the_launcher(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"steps": 500, "ranks": {"1": {"raise": "RuntimeError: boom", "hang": True, "deaf": True}}}
    outcome, _ = start(folder, plan, monkeypatch, patience=HASTY, FAKE_TORCHRUN_PATIENCE_S="300")
    assert outcome.gave_up
    assert fake_torchrun.processes_of(folder.root) == []


def test_a_rank_deaf_to_sigterm_is_killed_when_another_has_died(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"steps": 500, "ranks": {"0": {"deaf": True, "hang": True}, "1": {"die": signal.SIGBUS}}}
    outcome, _ = start(folder, plan, monkeypatch, patience=HASTY, FAKE_TORCHRUN_PATIENCE_S="300")
    assert outcome.gave_up
    assert fake_torchrun.processes_of(folder.root) == []


def test_a_stopped_rank_is_named_once_the_job_is_quiet(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = folder.root / "told"
    pids: dict[int, int] = {}

    def see(event: Event) -> None:
        match event:
            case RankReported():
                pids[event.report.rank] = event.report.pid
            case StepSeen() if event.step == 3:
                rank = psutil.Process(pids[1])
                rank.suspend()
                assert fake_torchrun.wait_until(lambda: rank.status() == psutil.STATUS_STOPPED)
            case Quiet() if event.stopped:
                os.kill(pids[1], signal.SIGCONT)
                told.touch()

    plan = {"steps": 6, "ranks": {"1": {"at": 3, "until": str(told)}}}
    outcome, events = start(folder, plan, monkeypatch, see, replace(QUICK, quiet_s=0.5))
    assert outcome.exit_code == 0
    assert outcome.figures[1].steps == 6
    # A machine that is busy may be quiet at other times too.
    (notice,) = [event for event in events if isinstance(event, Quiet) and event.stopped]
    assert str(notice).endswith(
        f"rank 1 (process {pids[1]}) was stopped, as by SIGSTOP; kill -CONT {pids[1]} lets it go on"
    )


def test_an_error_while_drawing_ends_the_job(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"steps": 500, "ranks": {"0": {"deaf": True, "child": True}}}

    def draw(event: Event) -> None:
        if isinstance(event, StepSeen):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(folder, plan, monkeypatch, draw)
    assert fake_torchrun.processes_of(folder.root) == []


def test_a_process_that_may_not_be_killed_keeps_none_of_the_others_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def refuse(process: psutil.Process) -> None:
        asked.append(process.pid)
        raise psutil.AccessDenied(process.pid)

    with subprocess.Popen(["bash", "-c", "sleep 600 & sleep 600 & wait"], start_new_session=True) as leash:
        below = psutil.Process(leash.pid).children
        try:
            assert fake_torchrun.wait_until(lambda: len(below()) == 2)
            with monkeypatch.context() as patched:
                patched.setattr(psutil.Process, "kill", refuse)
                _kill_below(leash)
            assert sorted(asked) == sorted(each.pid for each in below())
        finally:
            os.killpg(leash.pid, signal.SIGKILL)


@pytest.mark.parametrize("found", [(0, 0), (0, 3), (5, 2)])
def test_every_rank_is_asked_to_save_once_as_soon_as_it_is_found(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, found: tuple[float, float]
) -> None:
    outcome, told = asked_to_save(folder, monkeypatch, found)
    assert (outcome.exit_code, outcome.interrupted_by) == (0, signal.SIGTERM)
    assert all(report.finished and report.steps < STEPS for report in outcome.reports.values())
    assert sorted(told) == sorted(report.pid for report in outcome.reports.values())


def test_a_job_of_which_no_rank_is_ever_found_needs_no_second_signal(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, told = asked_to_save(folder, monkeypatch, (math.inf, math.inf))
    assert outcome.interrupted_by == signal.SIGTERM
    assert told == []
    # The leash told them, as it ended the job.
    assert all(report.steps < STEPS for report in outcome.reports.values())
    assert fake_torchrun.processes_of(folder.root) == []


def asked_to_save(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, found: tuple[float, float]
) -> tuple[Outcome, list[int]]:
    """Send SIGTERM at the first step; return also which processes the launcher itself told.

    Args:
        found: After how many vain looks each rank is seen to be below the leash.
    """
    parents, looks = psutil.Process.parents, Counter[int]()
    terminate, told = psutil.Process.terminate, []

    def above(self: psutil.Process) -> list[psutil.Process]:
        (rank,) = (n for n in range(2) if RankReport.read(folder.rank_report(n)).pid == self.pid)
        looks[rank] += 1
        return parents(self) if looks[rank] > found[rank] else []

    def tell(self: psutil.Process) -> None:
        told.append(self.pid)
        terminate(self)

    monkeypatch.setattr(psutil.Process, "parents", above)
    monkeypatch.setattr(psutil.Process, "terminate", tell)
    signalled: list[int] = []

    def see(event: Event) -> None:
        if isinstance(event, StepSeen) and not signalled:
            signalled.append(os.getpid())
            os.kill(os.getpid(), signal.SIGTERM)

    plan = {"steps": STEPS, "ranks": {"0": {"saves": True}, "1": {"saves": True}}}
    # Only who is never found may be given up.
    patience = QUICK if math.inf in found else replace(QUICK, grace_s=fake_torchrun.HANG_S)
    outcome, _ = start(folder, plan, monkeypatch, see, patience, saves_on_sigterm=True)
    return outcome, told


def test_a_command_that_cannot_start_is_an_outcome_not_a_crash(folder: RunFolder) -> None:
    outcome = run_job([sys.executable, "-c", "raise SystemExit(7)"], folder, range(1), print, patience=QUICK)
    assert outcome.exit_code == 7
    assert outcome.reports == {}


LAUNCHER = """
import sys
from pathlib import Path
from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.launch.job import Patience, run_job
outcome = run_job(sys.argv[3:], RunFolder(root=Path(sys.argv[1])), range(2), lambda event: None,
                  patience=Patience(poll_s=0.02, grace_s=float(sys.argv[2])))
print(outcome.interrupted_by)
"""


@contextmanager
def launcher(
    folder: RunFolder, plan: dict[str, Any], grace_s: float = 2.0, *, under: Sequence[str] = (), **more: str
) -> Iterator[subprocess.Popen[str]]:
    fixed = [*under, sys.executable, "-c", LAUNCHER, str(folder.root), str(grace_s)]
    arguments = [*fixed, *fake_torchrun.command(folder.root, 2)]
    with fake_torchrun.started(arguments, plan, **more) as process:
        assert fake_torchrun.wait_until(lambda: all(folder.rank_metrics(rank).exists() for rank in range(2)))
        yield process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("rank", [{}, {"deaf": True, "child": True}])
def test_a_signal_to_the_launcher_leaves_no_process(
    folder: RunFolder, signum: signal.Signals, rank: dict[str, bool]
) -> None:
    with launcher(folder, {"steps": 10000, "ranks": {"0": rank}}) as process:
        process.send_signal(signum)
        out, _ = process.communicate(timeout=fake_torchrun.HANG_S)
    assert out.strip() == str(int(signum))
    assert fake_torchrun.processes_of(folder.root) == []


def test_nohup_keeps_a_run_when_its_terminal_goes(folder: RunFolder) -> None:
    with launcher(folder, {"steps": 10000}, under=["nohup"]) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=fake_torchrun.HANG_S)
    assert out.strip() == str(int(signal.SIGTERM))


def test_a_second_signal_ends_the_grace(folder: RunFolder) -> None:
    plan = {"steps": 100_000, "ranks": {"0": {"deaf": True}}}
    forever = 10 * fake_torchrun.HANG_S
    with launcher(folder, plan, forever, FAKE_TORCHRUN_PATIENCE_S=str(forever)) as process:
        other = RankReport.read(folder.rank_report(1)).pid
        process.send_signal(signal.SIGINT)
        # Two at once would be one; SIGTERM to the ranks shows that the first one was noted.
        assert fake_torchrun.wait_until(lambda: other not in fake_torchrun.pids_of(folder.root))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=fake_torchrun.HANG_S)
    assert fake_torchrun.processes_of(folder.root) == []


def test_sigkill_to_the_launcher_leaves_no_process(folder: RunFolder) -> None:
    with launcher(folder, {"steps": 10000, "ranks": {"0": {"deaf": True, "child": True}}}) as process:
        assert len(fake_torchrun.processes_of(folder.root)) >= 5
        process.kill()
        process.communicate()
    assert fake_torchrun.wait_until(lambda: fake_torchrun.processes_of(folder.root) == [])


def test_sigkill_to_the_leash_leaves_no_process(folder: RunFolder) -> None:
    with launcher(folder, {"steps": 10000}) as process:
        (leash,) = psutil.Process(process.pid).children()
        leash.kill()
        out, _ = process.communicate(timeout=fake_torchrun.HANG_S)
    assert out.strip() == "None"
    assert fake_torchrun.wait_until(lambda: fake_torchrun.processes_of(folder.root) == [])
