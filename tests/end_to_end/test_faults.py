"""What a real run does when its drive, its machine or its user fails it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import fake_torchrun
import pytest

from muon_offload_cli.launch.torchrun_log import rank_exits
from tests.end_to_end.runs import DP2, TP2, Run, command, environment, state, train
from tests.fakes.drive import small_filesystem


@pytest.mark.parametrize(
    ("kind", "layout", "after", "words"),
    [
        ("read", TP2, 40, ("read", "EIO", "Input/output error")),
        ("write", DP2, 70, ("write", "EIO", "Input/output error")),
        ("short", TP2, 25, ("read", "the file ends there", "file size")),
    ],
)
def test_a_drive_error_on_one_rank_stops_the_run_with_path_and_cause(
    tmp_path: Path, directory: Path, kind: str, layout: tuple[str, ...], after: int, words: tuple[str, ...]
) -> None:
    fault = {"rank": 1, "kind": kind, "after": after}
    run = train(tmp_path / "run", *layout, *state(directory), "train.steps=500", fault=fault)
    assert run.exit_code == 4, run.output
    assert "rank 1 failed with StoreError" in run.output
    for word in (str(directory), *words):
        assert word in run.output
    failure = run.summary["failure"]
    assert failure["rank"] == 1
    report = run.reports[1]
    assert report.error.startswith("StoreError: ")
    assert str(directory) in report.error
    assert not report.finished
    assert 0 < len(run.records(1)) < 500
    assert killed_ranks(run.folder) == []
    assert "the launcher ended the rest" not in run.output
    assert not directory.exists()


def killed_ranks(folder: Path) -> list[int]:
    """Ranks that ended by SIGKILL, which torchrun sends to those that do not end for 30 s."""
    exits = rank_exits((folder / "logs" / "torchrun.log").read_text())
    assert exits
    return [each.rank for each in exits if each.exit_code == -signal.SIGKILL]


def test_a_write_that_fails_after_the_last_step_is_no_success(tmp_path: Path, directory: Path) -> None:
    # One chunk of one piece, held by a window from step to step: written at birth, and not again before the
    # run ends, which fails.
    words = (*DP2, *state(directory), "offload.chunk_mb=0", "train.steps=2")
    run = train(tmp_path / "run", *words, fault={"rank": 0, "kind": "write", "after": 1})
    assert [len(run.records(rank)) for rank in (0, 1)] == [2, 2]
    assert run.exit_code == 4, run.output
    assert str(directory) in run.output
    assert not run.reports[0].finished
    assert "EIO" in run.reports[0].error


def test_a_rank_that_quietly_keeps_its_state_in_memory_fails_the_run(tmp_path: Path, directory: Path) -> None:
    run = train(
        tmp_path / "run", *DP2, *state(directory), "train.steps=2", fault={"rank": 1, "kind": "memory"}
    )
    assert run.exit_code == 4, run.output
    last = run.output.splitlines()[-1]
    assert last.startswith("1 of 2 ranks: state on disk")
    assert "rank 1 kept its state in memory" in last
    assert run.reports[1].finished


def test_a_killed_rank_leaves_no_process_and_no_bytes(tmp_path: Path, directory: Path) -> None:
    folder = tmp_path / "run"
    # A killed rank cannot remove its folders, which three directories for two ranks give it three of.
    directories = [f"{directory}", f"{directory}-b", f"{directory}-c"]
    striped = f"offload.directory=[{','.join(directories)}]"
    words = command(folder, *DP2, "offload=disk", striped, "train.steps=5000")
    process = subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    try:
        run = Run(folder=folder, exit_code=0, output="", seconds=0)
        assert fake_torchrun.wait_until(lambda: len(run.records(1)) > 2)
        pid = run.reports[1].pid
        assert _state_files(directory) >= 6
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=fake_torchrun.HANG_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 4, output
    assert killed_ranks(folder) == [1]
    assert "the launcher ended the rest" not in output
    assert "rank 1 died of signal 9 (SIGKILL)" in output
    assert fake_torchrun.processes_of(tmp_path) == []
    assert _state_files(directory) == 0
    assert not any(Path(each).exists() for each in directories)


def _state_files(directory: Path) -> int:
    """Open files without a name in `directory`, of all processes."""
    found = 0
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found += str(link.readlink()).startswith(str(directory))
        except OSError:
            continue
    return found


def test_a_filesystem_that_is_too_small_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with small_filesystem(tmp_path) as mounted:
        directory = mounted / "state"
        free_before = os.statvfs(mounted).f_bavail
        run = train(
            tmp_path / "run",
            *DP2,
            *state(directory),
            "model=tiny_dense",
            "model.hidden_size=512",
            "model.ffn_hidden_size=2048",
            "model.num_layers=6",
        )
        assert run.exit_code == 3, run.output
        assert str(mounted) in run.output
        assert " free" in run.output
        assert "MiB" in run.output
        assert "fix:" in run.output
        assert "Traceback" not in run.output
        assert not run.records(0)
        assert not directory.exists()
        assert os.statvfs(mounted).f_bavail == free_before


def test_a_run_that_megatron_ends_early_is_judged_and_not_mourned(tmp_path: Path, directory: Path) -> None:
    run = train(tmp_path / "run", *DP2, *state(directory), "megatron.args.exit_interval=2")
    assert run.exit_code == 4, run.output
    assert "finished after 2 of 6 steps" in run.output
    assert "Traceback" not in run.output
    assert "SystemExit" not in run.output
    assert all(report.finished and report.digests for report in run.reports.values())


def test_cuda_on_a_machine_without_it_is_refused_with_a_fix(tmp_path: Path, directory: Path) -> None:
    run = train(tmp_path / "run", *DP2, *state(directory), "device=cuda", CUDA_VISIBLE_DEVICES="")
    if "torch sees" not in run.output and run.exit_code == 0:
        pytest.skip("this machine has CUDA devices that cannot be hidden")
    assert run.exit_code in (2, 3), run.output
    assert "device=cpu" in run.output
    assert "Traceback" not in run.output
    assert not directory.exists()
