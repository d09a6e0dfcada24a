"""``train --rehearse`` over a stand-in torchrun, and what it refuses before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_torchrun
import pytest

from muon_offload_cli.cli import main

PROGRAM = """
import sys
from muon_offload_cli.cli.main import run
sys.exit(run(["train", *sys.argv[1:], "--rehearse"]))
"""


def rehearse(tmp_path: Path, plan: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    fixed = ["recipe=tiny", f"offload.directory={tmp_path / 'nvme'}"]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *fixed, *words],
        env=fake_torchrun.environment(plan),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=fake_torchrun.HANG_S,
        check=False,
        start_new_session=True,
    )


def test_ranks_that_kept_their_state_in_memory_are_found_and_their_folder_is_kept(tmp_path: Path) -> None:
    done = rehearse(tmp_path, {"steps": 4, "ranks": {"2": {"memory": True}}})
    assert done.returncode == 4
    assert "error: rank 2 kept its state in none" in done.stdout
    (scratch,) = (tmp_path / "nvme").iterdir()
    assert f"kept for looking at: {scratch}" in done.stdout
    assert (scratch / "straight" / "run.sh").exists()


def test_the_second_leg_is_killed_and_a_missing_checkpoint_is_found(tmp_path: Path) -> None:
    rank: dict[str, Any] = {"in": "killed", "at": 3, "hang": True}
    # A rank without a number: signalling process 0 would end the rehearsal itself.
    ranks = dict.fromkeys("023", rank) | {"1": rank | {"report": {"pid": 0}}}
    done = rehearse(tmp_path, {"steps": 4, "ranks": ranks})
    assert done.returncode == 4
    assert "straight  4 steps" in done.stdout
    assert "killed    3 steps" in done.stdout
    assert "error: the killed run had saved nothing" in done.stdout
    assert fake_torchrun.processes_of(tmp_path) == []


def test_what_was_shrunk_and_kept_is_said_first(tmp_path: Path) -> None:
    done = rehearse(tmp_path, {"steps": 4, "ranks": {"0": {"die": 9}}})
    lines = done.stdout.splitlines()
    assert lines[0] == "rehearsing tiny on 4 CPU ranks"
    assert "  kept    layout TP2/EP2" in lines
    assert any(line.startswith("  shrunk  ") and "model.num_layers 4 -> 2" in line for line in lines)
    assert "rank 0 died of signal 9" in done.stdout


def test_keys_that_no_leg_reads_are_named_with_the_reason(tmp_path: Path) -> None:
    mine = ["checkpoint.directory=c", "resume=auto", "run.directory=r", "checkpoint.interval=0"]
    done = rehearse(tmp_path, {"steps": 4, "ranks": {"0": {"die": 9}}}, *mine)
    told = [line for line in done.stdout.splitlines() if line.startswith("  replaced ")]
    assert told == [
        "  replaced run.directory, checkpoint.directory, resume.source: its legs save, resume and write in a "
        f"folder of their own below {tmp_path / 'nvme'}"
    ]


def test_one_that_is_ended_says_so_last_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    arguments = [sys.executable, "-c", PROGRAM, "recipe=tiny", f"offload.directory={nvme}"]
    plan = {"steps": 4, "ranks": {"0": {"at": 2, "hang": True}}}
    with fake_torchrun.started(arguments, plan) as process:
        fake_torchrun.wait_until(lambda: len(list(nvme.glob("*/straight/reports/*.json"))) == 4)
        process.kill()
        process.wait(timeout=fake_torchrun.HANG_S)
    (left,) = nvme.iterdir()
    fake_torchrun.wait_until(lambda: fake_torchrun.processes_of(tmp_path) == [])
    with fake_torchrun.started(arguments, plan) as process:
        fake_torchrun.wait_until(lambda: not left.exists() and any(nvme.glob("*/straight/reports/*.json")))
        process.terminate()
        said, _ = process.communicate(timeout=fake_torchrun.HANG_S)
    assert process.returncode == 143
    assert f"  removed {left}, which a rehearsal that was killed had left" in said.splitlines()
    assert said.splitlines()[-1] == "ended by SIGTERM"
    assert list(nvme.iterdir()) == []


def test_a_user_error_of_a_rank_is_passed_on_and_nothing_is_left(tmp_path: Path) -> None:
    problem = {"what": "the drive is on fire.", "fix": "water", "exit_code": 3}
    plan = {"steps": 4, "ranks": {str(rank): {"problems": [problem]} for rank in range(4)}}
    done = rehearse(tmp_path, plan)
    assert done.returncode == 3
    assert "the drive is on fire." in done.stderr
    assert list((tmp_path / "nvme").iterdir()) == []


def test_json_is_one_object_on_standard_output(tmp_path: Path) -> None:
    done = rehearse(tmp_path, {"steps": 4, "ranks": {"1": {"memory": True}}}, "--json")
    found = json.loads(done.stdout)
    assert (found["recipe"], found["fine"]) == ("tiny", False)
    assert found["found"] == ["rank 1 kept its state in none"]
    assert "rehearsing tiny" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["recipe=qwen35_35b", "parallel.ep=3"], "parallel.ep=3"),
        (["recipe=qwen35_35b", "offload.directory=/proc/1/state"], "/proc/1/state"),
        (["recipe=qwen35_35b", "parallel.tp=4"], "model.num_query_groups=2"),
        (["recipe=tiny", "--dry-run"], "exclude each other"),
    ],
)
def test_a_planted_fault_is_refused_before_anything_starts(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["train", *words, "--rehearse"]) in (2, 3)
    assert told in capsys.readouterr().err
