"""The real job runner over a stand-in torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
from muon_offload_cli.launch.job import Outcome, Patience, run_job
from muon_offload_cli.launch.quiet import Quiet

QUICK = Patience(poll_s=0.02, grace_s=1.0, last_word_s=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(root=tmp_path / "run")
    for sub in (made.logs, made.metrics, made.reports):
        sub.mkdir(parents=True)
    return made


def start(
    folder: RunFolder, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ranks: int = 2, **more: str
) -> tuple[Outcome, list[Event]]:
    for key, value in fake_torchrun.environment(plan, **more).items():
        monkeypatch.setenv(key, value)
    events: list[Event] = []
    outcome = run_job(
        fake_torchrun.command(folder.root, ranks), folder, range(ranks), events.append, patience=QUICK
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
    outcome, events = start(folder, {"steps": 5, "pause_s": 0.1}, monkeypatch)
    of_rank_0 = [
        event.report for event in events if isinstance(event, RankReported) and event.report.rank == 0
    ]
    assert [report.finished for report in of_rank_0][-2:] == [False, True]
    assert outcome.reports[0].steps == 5


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
    outcome, _ = start(folder, plan, monkeypatch, FAKE_TORCHRUN_PATIENCE_S="300")
    assert outcome.gave_up
    assert fake_torchrun.processes_of(folder.root) == []


def test_a_rank_deaf_to_sigterm_is_killed_when_another_has_died(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"steps": 500, "ranks": {"0": {"deaf": True, "hang": True}, "1": {"die": signal.SIGBUS}}}
    outcome, _ = start(folder, plan, monkeypatch, FAKE_TORCHRUN_PATIENCE_S="300")
    assert outcome.gave_up
    assert fake_torchrun.processes_of(folder.root) == []


def test_a_stopped_rank_is_named_once_the_job_is_quiet(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in fake_torchrun.environment({"steps": 30}).items():
        monkeypatch.setenv(key, value)
    pids: dict[int, int] = {}
    seen: list[Quiet] = []

    def see(event: Event) -> None:
        match event:
            case RankReported():
                pids[event.report.rank] = event.report.pid
            case StepSeen() if event.step == 3:
                os.kill(pids[1], signal.SIGSTOP)
            case Quiet():
                seen.append(event)
                os.kill(pids[1], signal.SIGCONT)

    patience = replace(QUICK, quiet_s=0.5)
    outcome = run_job(fake_torchrun.command(folder.root, 2), folder, range(2), see, patience=patience)
    assert outcome.exit_code == 0
    assert outcome.figures[1].steps == 30
    (notice,) = seen
    assert str(notice).endswith(
        f"rank 1 (process {pids[1]}) was stopped, as by SIGSTOP; kill -CONT {pids[1]} lets it go on"
    )


def test_an_error_while_drawing_ends_the_job(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in fake_torchrun.environment(
        {"steps": 500, "ranks": {"0": {"deaf": True, "child": True}}}
    ).items():
        monkeypatch.setenv(key, value)

    def draw(event: Event) -> None:
        if isinstance(event, StepSeen):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_job(fake_torchrun.command(folder.root, 2), folder, range(2), draw, patience=QUICK)
    assert fake_torchrun.processes_of(folder.root) == []


def test_a_command_that_cannot_start_is_an_outcome_not_a_crash(folder: RunFolder) -> None:
    outcome = run_job([sys.executable, "-c", "raise SystemExit(7)"], folder, range(1), print, patience=QUICK)
    assert outcome.exit_code == 7
    assert outcome.reports == {}


LAUNCHER_GRACE_S = 4.0
LAUNCHER = """
import sys
from pathlib import Path
from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.launch.job import Patience, run_job
outcome = run_job(sys.argv[2:], RunFolder(root=Path(sys.argv[1])), range(2), lambda event: None,
                  patience=Patience(poll_s=0.02, grace_s=4.0))
print(outcome.interrupted_by)
"""


@contextmanager
def launcher(folder: RunFolder, plan: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", LAUNCHER, str(folder.root), *fake_torchrun.command(folder.root, 2)]
    with fake_torchrun.started(arguments, plan) as process:
        assert fake_torchrun.wait_until(lambda: all(folder.rank_metrics(rank).exists() for rank in range(2)))
        yield process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("rank", [{}, {"deaf": True, "child": True}])
def test_a_signal_to_the_launcher_leaves_no_process(
    folder: RunFolder, signum: signal.Signals, rank: dict[str, bool]
) -> None:
    with launcher(folder, {"steps": 10000, "ranks": {"0": rank}}) as process:
        process.send_signal(signum)
        out, _ = process.communicate(timeout=20)
    assert out.strip() == str(int(signum))
    assert fake_torchrun.processes_of(folder.root) == []


def test_a_second_signal_ends_the_grace(folder: RunFolder) -> None:
    with launcher(folder, {"steps": 10000, "ranks": {"0": {"deaf": True}}}) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        before = time.monotonic()
        process.communicate(timeout=20)
    assert time.monotonic() - before < LAUNCHER_GRACE_S / 2
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
        out, _ = process.communicate(timeout=20)
    assert out.strip() == "None"
    assert fake_torchrun.wait_until(lambda: fake_torchrun.processes_of(folder.root) == [])
