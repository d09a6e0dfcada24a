"""``disk-plan`` and ``bench-disk`` on the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from muon_offload_cli.checkpoints.listing import interrupted_bytes
from muon_offload_cli.checkpoints.names import SAVING, step_folder
from muon_offload_cli.cli import bench_disk, main
from muon_offload_cli.cli.exact import compare_rank
from muon_offload_cli.config import probe_cache
from muon_offload_cli.machine import filesystem
from muon_offload_cli.machine.drives import recall
from muon_offload_cli.units import MIB, format_bytes
from tests.checkpoints import forged
from tests.fakes.drive import directory_on_a_drive
from tests.fakes.fake_torchrun import HANG_S
from tests.planner.plans import planner

RECIPE = "recipe=tiny"
Figures = namedtuple("Figures", "f_blocks f_frsize f_bavail f_flag")


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = probe_cache.cache_file()
    monkeypatch.setattr(probe_cache, "cache_file", lambda: shared)
    monkeypatch.setenv("SCRATCH", str(directory_on_a_drive(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: str) -> int:
    return main.run(["disk-plan", RECIPE, *arguments])


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run("--json", *arguments) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filesystem has 20 MB free."""
    look = os.statvfs

    def statvfs(path: Path) -> Figures:
        look(path)  # A path that does not exist is an error here too.
        return Figures(10**6, 1000, 20_000, 0)

    monkeypatch.setattr(filesystem.os, "statvfs", statvfs)


def test_figures_bars_and_verdict_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    for text in (
        "7,350,528 parameters",
        "13.53 MiB in 37 chunks",
        "ranks 0-3",
        "█",
        "not known: give --bandwidth",
    ):
        assert text in out
    assert out.endswith("fits\n")


def test_json_has_exact_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--bandwidth", "1,2")
    (kind,) = found["kinds"]
    assert kind["ranks"] == [0, 1, 2, 3]
    assert kind["disk_bytes"] == 14188544
    assert found["needed_bytes"] == found["nodes"][0]["disk_bytes"] == 4 * 14188544
    assert found["fits"] is True
    assert found["step"]["floor_s"] == found["nodes"][0]["each_way_bytes"] / 1e9


@pytest.mark.parametrize(
    ("count", "placement"),
    [
        (2, "ranks are spread over 2 directories, 2 to each"),
        (3, "each rank's file is striped over all 3 directories"),
    ],
)
def test_several_directories_get_equal_parts_and_the_plan_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, placement: str
) -> None:
    folders = [str(tmp_path / f"nvme{number}") for number in range(count)]
    found = as_json(capsys, f"offload.directory=[{','.join(folders)}]")
    assert found["placement"] == placement
    assert [each["path"] for each in found["directories"]] == folders
    parts = [each["needed_bytes"] for each in found["directories"]]
    assert sum(parts) == found["needed_bytes"]
    assert max(parts) - min(parts) <= 0.1 * min(parts)


@pytest.mark.usefixtures("nearly_full")
def test_a_plan_that_does_not_fit_exits_with_3_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 3
    captured = capsys.readouterr()
    assert captured.out.endswith("does not fit\n")
    assert "54.12 MiB" in captured.err
    advised = re.search(r"offload\.fraction=0\.\d+", captured.err)
    assert advised is not None
    assert run(advised.group()) == 0
    capsys.readouterr()
    found = as_json(capsys, code=3)
    assert found["fits"] is False
    assert "19.07 MiB free" in found["problems"][0]["what"]


@pytest.mark.usefixtures("nearly_full")
@pytest.mark.parametrize("command", ["check-config", "train"])
def test_a_drive_that_is_too_small_is_told_before_anything_starts(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([command, RECIPE, "device=cpu"]) == 3
    assert "4 ranks would need 54.12 MiB" in capsys.readouterr().err


@pytest.mark.usefixtures("nearly_full")
@pytest.mark.parametrize("command", ["check-config", "disk-plan"])
@pytest.mark.parametrize("engine", ["none", "host"])
def test_a_drive_without_room_for_checkpoints_is_told_whatever_the_engine(
    command: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = f"checkpoint.directory={tmp_path / 'saved'}"
    assert main.run([command, RECIPE, f"offload.engine={engine}", saved]) == 3
    told = capsys.readouterr().err
    assert format_bytes(planner("tiny").plan().checkpoint_bytes) in told
    assert saved in told


def test_room_is_asked_for_the_checkpoints_that_stand_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [RECIPE, "offload.engine=host", f"checkpoint.directory={tmp_path}", "train.steps=5"]
    one = planner("tiny").plan().checkpoint_bytes
    more = {"": 1, "checkpoint.interval=2": 3, "checkpoint.interval=1 checkpoint.keep=1": 2}
    for given, count in more.items():
        assert main.run(["disk-plan", *words, *given.split()]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoints "))
        assert line.endswith(f" {format_bytes(count * one)} needed")
    forged.save(tmp_path, 2)
    # The one that it goes on from has its room.
    assert main.run(["disk-plan", *words, "checkpoint.interval=1", "checkpoint.keep=1", "resume=auto"]) == 0
    assert f" {format_bytes(one)} needed" in capsys.readouterr().out


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("command", ["check-config", "disk-plan"])
def test_a_run_whose_save_was_interrupted_goes_on_where_its_remains_make_room(
    command: str, weights_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, source = tmp_path / "saved", tmp_path / "other" if weights_only else tmp_path / "saved"
    forged.save(source, 2)
    forged.write_files(step_folder(saved / SAVING, 3))
    left = interrupted_bytes(saved)
    assert left > 0
    kept = ["checkpoint.interval=1", "checkpoint.keep=1", "train.steps=5"]
    kept += [f"resume={source}", "resume.weights_only=true"] if weights_only else ["resume=auto"]
    words = [command, RECIPE, "offload.engine=host", f"checkpoint.directory={saved}", *kept]
    needed = (2 if weights_only else 1) * planner("tiny").plan().checkpoint_bytes - left
    for free, code in ((needed, 0), (needed - 1, 3)):
        monkeypatch.setattr(filesystem.os, "statvfs", lambda _, free=free: Figures(10**9, 1, free, 0))
        assert main.run(words) == code


def test_what_is_wrong_is_refused_as_check_config_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["launcher.ranks_per_node=3"],
        ["offload.fraction=2", "model.moe.topk=9"],
        ["model.nmae=x"],
        ["cluster=h200_x8", "megatron.args.recompute_granularty=full"],
    ):
        assert main.run(["check-config", RECIPE, *words]) == 2
        refused = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert run(*words) == 2
        assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")] == refused


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--bandwidth", "0,1"], "--bandwidth 0,1"),
        (["--forward-backward", "-1"], "--forward-backward -1"),
        (["--forward-backward", "nan"], "no time in seconds"),
        (["--run", "/no/such/folder"], "no metrics"),
        (["--run", "/no/such/folder", "--forward-backward", "1"], "twice"),
        (["--plot", "plan.jpg"], "must end in"),
        (["--plot", "/no/such/folder/plan.svg"], "fix: mkdir -p /no/such/folder"),
        (["--ranks", "0"], "fix: --exact --ranks 0"),
        (["model.moe.layer_freq='[1]*3'"], "layer_freq"),
    ],
)
def test_bad_options_are_refused_with_their_name(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert text in capsys.readouterr().err


def test_pictures_are_drawn(tmp_path: Path) -> None:
    for name, start in (("plan.svg", "<svg"), ("plan.html", "<!doctype html>")):
        assert run("--plot", str(tmp_path / name)) == 0
        assert (tmp_path / name).read_text().startswith(start)


def test_a_picture_that_cannot_be_written_gets_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.svg").mkdir()
    assert run("--plot", str(tmp_path / "a.svg")) == 2
    assert f"fix: --plot {tempfile.gettempdir()}/a.svg" in capsys.readouterr().err


def test_png_needs_a_library_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    assert run("--plot", str(tmp_path / "plan.png")) == 2
    assert "pip install cairosvg" in capsys.readouterr().err


def test_another_cluster_is_judged_by_what_its_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "cluster=h200_x8")
    assert found["free_bytes"] == 8 * 3_840_000_000_000
    assert found["host_headroom_bytes"] == 2048 * 2**30
    assert as_json(capsys, "cluster=gb300_x4")["free_bytes"] is None


@pytest.mark.parametrize(("recipe", "limit"), [("qwen35_35b", 2_500_000), ("kimi_k2", 5_000_000)])
def test_the_largest_models_are_planned_in_seconds_from_a_cold_start(recipe: str, limit: int) -> None:
    """A second is a million calls and more; unlike seconds, calls are the same on every machine."""
    text = (
        "import sys, itertools; calls = itertools.count()\n"
        "sys.setprofile(lambda frame, event, argument: event == 'call' and next(calls))\n"
        "from muon_offload_cli.cli.main import run\n"
        f"code = run(['disk-plan', 'recipe={recipe}']); sys.setprofile(None); print(code, next(calls))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    code, calls = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0, done.stderr
    assert 10_000 < calls < limit


def entries(rank: int) -> list[dict[str, Any]]:
    held, share = planner("tiny").of_rank(rank)
    owned = {id(tensor) for tensor in share.muon}
    rows = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "optimizer": str(tensor.optimizer),
            "expert": tensor.expert,
            "owner": id(tensor) in owned,
            "owned_numel": 0,
        }
        for tensor in held
    ]
    next(row for row in rows if row["optimizer"] == "adam")["owned_numel"] = share.adam_elements
    return rows


@pytest.mark.parametrize(
    ("index", "change", "text"),
    [
        (None, {}, None),
        (3, {"shape": [1, 2]}, "Megatron builds decoder.layers.0.self_attention.linear_qkv.weight [1, 2]"),
        (3, {"owner": True}, "Megatron's rank owns decoder.layers.0.self_attention.linear_qkv.weight"),
        (0, {"owned_numel": 1}, "Adam's state"),
    ],
)
def test_a_difference_from_megatron_is_named(
    index: int | None, change: dict[str, Any], text: str | None
) -> None:
    rows = entries(0)
    if index is not None:
        rows[index] |= change
    found = compare_rank(0, *planner("tiny").of_rank(0), rows)
    assert (found == []) if text is None else (text in found[0])


def test_a_drive_is_measured_and_remembered_for_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_disk, "LARGEST_PART", 1)
    folder = directory_on_a_drive(tmp_path) / "drive"
    folder.mkdir()
    assert main.run(["bench-disk", str(folder), "--size-mb", "64", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "both: read" in out
    assert "8 + 8 threads of 8 MiB" in out or "4 + 4 threads" in out
    assert list(folder.iterdir()) == []
    assert recall(filesystem.inspect(folder).mount_point) is not None
    assert run() == 0
    assert "(measured on " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["relative"], 2, "no absolute path"),
        (["/proc"], 3, "/proc has 0 B free"),
        (["/dev/shm/x"], 3, "memory, not a drive"),
        (["/no/such/folder"], 2, "there is no such folder"),
        (
            [__file__],
            2,
            f"that is a file, not a folder.\n  fix: muon-offload bench-disk {Path(__file__).parent}",
        ),
        (["/" + "x" * 300], 2, "File name too long"),
    ],
)
def test_what_is_no_drive_is_not_measured(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench-disk", *arguments]) == code
    told = capsys.readouterr().err
    assert text in told
    assert "fix: " in told


def test_a_file_too_small_and_a_time_out_of_range_are_refused_together_with_what_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench-disk", str(tmp_path), "--size-mb", "8", "--seconds", "nan"]) == 2
    told = capsys.readouterr().err
    assert "fix: --size-mb 64" in told
    assert "fix: --seconds 0.3" in told


def test_a_file_that_is_larger_than_the_drive_allows_is_cut_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"direct": True, "size": 64 * MIB}
    both = {"way": "both", "request_bytes": 8 * MIB, "threads": 8, "read": 1.0, "written": 1.0}
    cases = [both, both | {"way": "read"}, both | {"way": "write"}]
    monkeypatch.setattr(bench_disk, "_run", lambda arguments, seconds: [about, *cases])
    folder = directory_on_a_drive(tmp_path)
    assert main.run(["bench-disk", str(folder), "--size-mb", "99999999"]) == 0
    assert "MiB is used, not of 99999999" in capsys.readouterr().err


def pair(mib: int, threads: int, rate: float) -> dict[str, object]:
    return {"way": "both", "request_bytes": mib * MIB, "threads": threads, "read": rate, "written": rate}


def test_the_fastest_pair_is_chosen_and_threads_are_advised_where_they_gain_much() -> None:
    default, close = pair(8, 8, 1.0), pair(8, 16, 1.05)
    chosen = bench_disk.choose([default, close, pair(1, 8, 0.2), pair(16, 4, 1.25)])
    assert chosen == {
        "request_bytes": 16 * MIB,
        "threads": 4,
        "rate": 2.5,
        "default": 0.8,
        "io_threads": None,
    }
    chosen = bench_disk.choose([default, close, pair(8, 4, 1.25)])
    assert (chosen["threads"], chosen["default"], chosen["io_threads"]) == (4, 0.8, 4)


@pytest.mark.usefixtures("nearly_full")
def test_a_nearly_full_drive_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench-disk", str(tmp_path)]) == 3
    assert "so that the drive is not filled" in capsys.readouterr().err
