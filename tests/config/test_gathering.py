"""Facts are what the machine shows, and the probe's every way to fail is a problem."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.gathering import ask_megatron, gather_facts, needs_probe, resolve_directory

CONFIG = compose("tiny").config


def answer_of(script: str, timeout_s: float = 20.0):  # type: ignore[no-untyped-def]
    return ask_megatron(CONFIG, timeout_s=timeout_s, command=[sys.executable, "-c", script])


def test_the_probes_answer_is_its_last_json_line_whatever_imports_print_before() -> None:
    said = {
        "megatron_version": "0.19.2",
        "flags": ["--num-layers", "bf16"],
        "cuda_available": False,
        "problems": [{"what": "emerging-optimizers is a stub.", "fix": "pip install emerging-optimizers"}],
    }
    report = answer_of(f"print('noise'); print({json.dumps(said)!r})")
    assert report.flags == {"num_layers", "bf16"}
    assert report.megatron_version == "0.19.2"
    assert report.cuda_available is False
    (problem,) = report.problems
    assert (problem.what, problem.fix, problem.exit_code) == (
        "emerging-optimizers is a stub.",
        "pip install emerging-optimizers",
        3,
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise SystemExit('boom')", "exited with 1: boom"),
        ("pass", "exited with 0: it printed nothing"),
        ("print('[1]')", "exited with 0"),
        ("import os; os.kill(os.getpid(), 9)", "exited with -9"),
    ],
)
def test_a_probe_that_says_nothing_is_a_problem_with_its_last_words(script: str, words: str) -> None:
    (problem,) = answer_of(script).problems
    assert words in problem.what
    assert problem.exit_code == 3


def test_a_probe_that_hangs_is_given_up() -> None:
    (problem,) = answer_of("import time; time.sleep(60)", timeout_s=0.5).problems
    assert "gave no answer in 0.5 s" in problem.what


def test_a_probe_that_cannot_be_started_is_a_problem() -> None:
    (problem,) = ask_megatron(CONFIG, command=["/no/such/python"]).problems
    assert "could not be started" in problem.what


def test_a_checkout_goes_before_the_installed_megatron(tmp_path: Path) -> None:
    config = compose("tiny", [f"megatron.path={tmp_path}"]).config
    script = "import os, json; print(json.dumps({'megatron_version': os.environ['PYTHONPATH']}))"
    report = ask_megatron(config, command=[sys.executable, "-c", script])
    assert report.megatron_version is not None
    assert report.megatron_version.split(os.pathsep)[0] == str(tmp_path)


def test_only_megatrons_own_flags_and_devices_need_the_probe() -> None:
    assert not needs_probe(CONFIG)
    for word in ("megatron.args.x=1", "device=cuda", "megatron.path=/x"):
        assert needs_probe(compose("tiny", [word]).config)


def test_a_directory_that_does_not_exist_is_judged_by_its_nearest_parent_and_not_made(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    config = compose("tiny", [f"offload.directory={target}"]).config
    directory = gather_facts(config, probe=False).directory
    assert directory is not None
    assert (directory.path, directory.nearest, directory.exists) == (target, tmp_path.resolve(), False)
    assert directory.writable
    assert directory.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_the_directory_is_seen(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config = compose("tiny", [f"offload.directory={tmp_path}/file/state"]).config
    directory = gather_facts(config, probe=False).directory
    assert directory is not None
    assert not directory.is_folder


def test_data_files_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "full.txt").write_text("abc")
    (tmp_path / "empty.txt").touch()
    names = [str(tmp_path / name) for name in ("full.txt", "empty.txt", "missing.txt", ".")]
    config = compose("tiny", ["data=text", f"data.paths=[{','.join(names)}]", "offload=none"]).config
    facts = gather_facts(config, probe=False)
    assert facts.directory is None
    assert [facts.files[name].num_bytes for name in names] == [3, 0, None, None]
    assert facts.files[names[3]].is_folder


def test_the_default_directory_is_filled_in_for_engines_that_keep_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCRATCH", "/mnt/x")
    assert resolve_directory(compose("tiny").config).offload.directory == "/mnt/x/muon_offload"
    assert resolve_directory(compose("tiny", ["offload=host"]).config).offload.directory is None
    assert resolve_directory(compose("tiny", ["offload.directory=/a"]).config).offload.directory == "/a"
