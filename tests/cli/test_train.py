"""The train command, end to end over a stand-in torchrun."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_torchrun
import pytest
import yaml

from muon_offload_cli.cli import main
from muon_offload_cli.machine.devices import gpu_count
from tests.checkpoints import forged

TRAIN = """
import sys
from muon_offload_cli.cli.main import run
sys.exit(run(["train", *sys.argv[1:]]))
"""
JSON = """
import sys
from muon_offload_cli.cli.train import train_command
sys.exit(train_command(sys.argv[1:], json=True))
"""


def words(tmp_path: Path, *more: str) -> list[str]:
    fixed = ["recipe=tiny", "device=cpu", "train.steps=3", f"offload.directory={tmp_path}"]
    return [*fixed, f"run.directory={tmp_path / 'run'}", *more]


def train(
    tmp_path: Path, plan: dict[str, Any], *more: str, program: str = TRAIN, directory: bool = True
) -> subprocess.CompletedProcess[str]:
    arguments = words(tmp_path, *more)
    if not directory:
        arguments = [word for word in arguments if not word.startswith("run.directory")]
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=fake_torchrun.environment(plan),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=fake_torchrun.HANG_S,
        check=False,
    )


def test_a_run_ends_in_its_verdict_and_leaves_its_folder(tmp_path: Path) -> None:
    done = train(tmp_path, {"steps": 3})
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[-1] == "4 of 4 ranks: state on disk (16.00 MiB)"
    assert [line[:8] for line in lines if line.startswith("step ")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "step 2/3  loss 2.5000  grad norm 1.500  0.80 s  read 20.00 MiB/s  write 20.00 MiB/s" in lines
    run = tmp_path / "run"
    assert yaml.safe_load((run / "resolved.yaml").read_text())["device"] == "cpu"
    assert (run / "run.sh").stat().st_mode & 0o100
    head = (run / "run.sh").read_text().splitlines()[1]
    assert shlex.split(head) == ["#", "muon-offload", "train", *words(tmp_path)]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["success"], summary["steps"], summary["first_loss"]) == (True, 3, 5.0)
    assert [row["disk_bytes"] for row in summary["ranks"]] == [4 << 20] * 4
    assert summary["failure"] is None


def test_without_a_directory_the_folder_is_named_by_recipe_and_time(tmp_path: Path) -> None:
    done = train(tmp_path, {"steps": 3}, directory=False)
    (run,) = (tmp_path / "runs" / "tiny").iterdir()
    assert done.returncode == 0
    assert re.fullmatch(r"\d{8}-\d{6}", run.name)
    assert (run / "logs" / "torchrun.log").exists()


def test_a_rank_that_kept_its_state_in_memory_exits_4_and_is_named(tmp_path: Path) -> None:
    done = train(tmp_path, {"steps": 3, "ranks": {"2": {"memory": True}}})
    assert done.returncode == 4
    assert done.stdout.splitlines()[-1] == (
        "3 of 4 ranks: state on disk (12.00 MiB); "
        "rank 2 kept its state in memory: offload.engine=disk was asked for, none was attached"
    )


def test_a_killed_rank_is_told_without_the_noise_of_others(tmp_path: Path) -> None:
    closed = "RuntimeError: Connection closed by peer"
    told_of_it = {"raise": closed, "at": 2, "after": 1, "deaf": True}
    plan = {"steps": 500, "ranks": {"1": {"die": 9}, "0": told_of_it}}
    done = train(tmp_path, plan)
    assert done.returncode == 4
    assert "error: rank 1 died of signal 9 (SIGKILL), after step 1 of 3." in done.stdout
    assert "likely cause:" in done.stdout
    assert "| about to end on rank 1" in done.stdout
    assert f"log: {tmp_path}/run/logs/rank_1.log" in done.stdout
    assert closed not in done.stdout
    assert json.loads((tmp_path / "run/summary.json").read_text())["failure"]["rank"] == 1
    assert fake_torchrun.processes_of(tmp_path) == []


@pytest.mark.parametrize("code", [2, 3])
def test_a_user_error_of_the_ranks_is_told_once_with_its_code(tmp_path: Path, code: int) -> None:
    problem = {"what": "the disk is too small.", "fix": "offload.chunk_mb=1", "exit_code": code}
    rank = {"problems": [problem], "raise": "too small", "at": 0}
    done = train(tmp_path, {"steps": 3, "ranks": dict.fromkeys("0123", rank)})
    assert done.returncode == code
    assert done.stderr == "error: the disk is too small.\n  fix: offload.chunk_mb=1\n"
    assert "Traceback" not in done.stdout
    assert json.loads((tmp_path / "run/summary.json").read_text())["exit_code"] == code


def test_a_refused_config_makes_no_folder(tmp_path: Path) -> None:
    done = train(tmp_path, {}, "launcher.ranks_per_node=3", "offload.fraction=2")
    assert done.returncode == 2
    assert done.stderr.count("error: ") >= 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").touch()
    done = train(tmp_path, {})
    assert done.returncode == 2
    assert "run.directory=" in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


def test_a_dry_run_writes_nothing_and_prints_what_bash_can_run(tmp_path: Path) -> None:
    done = train(tmp_path, {"steps": 3}, "--dry-run")
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert "steps: 3\n" in done.stdout
    assert "torch.distributed.run" in done.stdout
    ran = subprocess.run(
        ["bash"], input=done.stdout, env=fake_torchrun.environment({"steps": 3}), text=True, check=False
    )
    assert ran.returncode == 0
    assert json.loads((tmp_path / "run/reports/rank_3.json").read_text())["finished"]


def test_fewer_gpus_than_ranks_are_told_with_layouts_that_fit_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ntest "$1" = -L && echo "GPU 0: a" && echo "GPU 1: b" || echo 8192\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if gpu_count() != 2:
        pytest.skip("this machine has GPUs of its own")
    assert main.run(["train", "recipe=tiny", f"run.directory={tmp_path / 'run'}", "--dry-run"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "launcher.ranks_per_node=4 needs 4 GPUs, and this machine has 2" in told
    assert "What fits here, with what it keeps on each GPU of 8.00 GiB besides activations" in told
    assert "fix: device=cuda launcher.ranks_per_node=2" in told


def test_json_is_the_only_thing_on_standard_output(tmp_path: Path) -> None:
    done = train(tmp_path, {"steps": 3}, program=JSON)
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "run/summary.json").read_text())
    assert done.stderr.splitlines()[-1] == "4 of 4 ranks: state on disk (16.00 MiB)"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_exits_as_shells_expect_and_leaves_no_process(
    tmp_path: Path, signum: signal.Signals
) -> None:
    plan = {"steps": 10000, "ranks": {"1": {"child": True}}}
    with fake_torchrun.started([sys.executable, "-c", TRAIN, *words(tmp_path)], plan) as process:
        assert fake_torchrun.wait_until((tmp_path / "run/metrics/rank_3.jsonl").exists)
        process.send_signal(signum)
        out, err = process.communicate(timeout=fake_torchrun.HANG_S)
    assert (process.returncode, err) == (128 + signum, "")
    assert f"ended by {signum.name}" in out
    assert json.loads((tmp_path / "run/summary.json").read_text())["interrupted_by"] == signum
    assert fake_torchrun.processes_of(tmp_path) == []


def test_sigkill_to_the_command_leaves_no_process_and_its_checkpoint_folder_to_the_next(
    tmp_path: Path,
) -> None:
    plan = {"steps": 10000, "ranks": {"1": {"deaf": True}}}
    saving = f"checkpoint.directory={tmp_path / 'saved'}"
    with fake_torchrun.started([sys.executable, "-c", TRAIN, *words(tmp_path, saving)], plan) as process:
        assert fake_torchrun.wait_until((tmp_path / "run/metrics/rank_3.jsonl").exists)
        second = train(tmp_path, plan, saving, f"run.directory={tmp_path / 'second'}")
        assert (second.returncode, second.stdout) == (2, "")
        assert f"{saving}: another run saves there now (process {process.pid} on " in second.stderr
        assert not (tmp_path / "second").exists()
        process.kill()
        process.communicate()
    assert fake_torchrun.wait_until(lambda: fake_torchrun.processes_of(tmp_path) == [])
    third = train(tmp_path, {"steps": 3}, saving, f"run.directory={tmp_path / 'third'}")
    assert (third.returncode, third.stderr) == (0, "")


SAVED_MEANWHILE = """
import sys
from pathlib import Path
from muon_offload_cli.cli import train
from tests.checkpoints import forged
directory, sole_saver = Path(sys.argv.pop(1)), train.sole_saver
def after_another(config):
    forged.save(directory, 8)
    return sole_saver(config)
train.sole_saver = after_another
from muon_offload_cli.cli.main import run
sys.exit(run(["train", *sys.argv[1:]]))
"""
"""A run that ends, with a last save, after this one was judged and before it holds the folder."""


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_the_checkpoint_is_chosen_among_those_that_stand_when_the_folder_is_held(
    tmp_path: Path, resume: str
) -> None:
    saved = tmp_path / "saved"
    if resume == "auto":
        forged.save(saved, 4)
    more = [f"checkpoint.directory={saved}", "train.steps=10", f"resume={resume}"]
    done = subprocess.run(
        [sys.executable, "-c", SAVED_MEANWHILE, str(saved), *words(tmp_path, *more)],
        env=fake_torchrun.environment({"steps": 3}),
        capture_output=True,
        text=True,
        timeout=fake_torchrun.HANG_S,
        check=False,
    )
    if resume == "auto":
        assert "takes step 8 of" in done.stderr + done.stdout
        assert "takes step 4 of" not in done.stderr + done.stdout
        assert yaml.safe_load((tmp_path / "run/resolved.yaml").read_text())["resume"]["step"] == 8
    else:
        assert done.returncode == 2
        assert "holds checkpoints (the last of step 8)" in done.stderr
        assert not (tmp_path / "run").exists()


def test_a_reader_that_goes_away_ends_the_job_without_a_traceback(tmp_path: Path) -> None:
    job = [sys.executable, "-c", "from muon_offload_cli.cli.main import main; main()", "train"]
    with fake_torchrun.started([*job, *words(tmp_path)], {"steps": 500, "pause_s": 0.05}) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(fake_torchrun.HANG_S) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""
    assert fake_torchrun.wait_until(lambda: not fake_torchrun.processes_of(tmp_path / "run"))


def test_the_json_option_of_the_command_line_prints_the_summary_alone_on_standard_output(
    tmp_path: Path,
) -> None:
    done = train(tmp_path, {"steps": 3}, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "step 3/3" in done.stderr


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [("line", 2, "a.jsonl line 2 has an empty response"), ("cache", 3, "a.jsonl is a file, not a folder")],
)
def test_faults_of_the_data_are_told_before_a_rank_starts(
    tmp_path: Path, fault: str, code: int, told: str
) -> None:
    response = "" if fault == "line" else "r"
    lines = [{"prompt": "p", "response": "r"}, {"prompt": "p", "response": response}]
    data = tmp_path / "a.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    cache = data / "cache" if fault == "cache" else tmp_path / "cache"
    done = train(tmp_path, {"steps": 3}, "data=chat", f"data.paths=[{data}]", f"data.cache_directory={cache}")
    assert done.returncode == code
    assert told in done.stderr
    assert not (tmp_path / "run").exists()
