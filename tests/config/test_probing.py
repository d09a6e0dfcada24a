"""The probe's every way to fail is a problem, and its answer is kept only as long as it can be trusted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from muon_offload_cli.config import probe_cache
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.probing import ask_megatron, has_compact_layout, needs_probe, read_answer
from muon_offload_cli.config.rules.facts import FlagFacts

CONFIG = compose("tiny").config


def answer_of(script: str, **more: float):  # type: ignore[no-untyped-def]
    return ask_megatron(**more, command=[sys.executable, "-c", script])


def test_the_probes_answer_is_its_last_json_line_whatever_imports_print_before() -> None:
    said = {
        "megatron_version": "0.19.2",
        "flags": {
            "--num-layers": {"nargs": None, "kind": "int", "choices": []},
            "bf16": {"nargs": 0, "kind": "", "choices": []},
        },
        "cuda_available": False,
        "problems": [{"what": "emerging-optimizers is a stub.", "fix": "pip install emerging-optimizers"}],
    }
    report = answer_of(f"print('noise'); print({json.dumps(said)!r})")
    assert report.megatron is not None
    assert report.megatron.flags == {"num_layers": FlagFacts(kind="int"), "bf16": FlagFacts(nargs=0)}
    assert report.megatron.version == "0.19.2"
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
    (problem,) = ask_megatron(command=["/no/such/python"]).problems
    assert "could not be started" in problem.what


def test_a_checkout_goes_before_the_installed_megatron(tmp_path: Path) -> None:
    script = "import os, json; print(json.dumps({'megatron_version': os.environ['PYTHONPATH']}))"
    report = ask_megatron(str(tmp_path), command=[sys.executable, "-c", script])
    assert report.megatron is not None
    assert report.megatron.version is not None
    assert report.megatron.version.split(os.pathsep)[0] == str(tmp_path)


def test_a_checkout_is_asked_for_its_layout_in_the_source_of_its_parser(tmp_path: Path) -> None:
    parser = tmp_path / "megatron/training/arguments.py"
    assert not has_compact_layout(str(tmp_path))
    parser.parent.mkdir(parents=True)
    parser.write_text(
        "group.add_argument('--no-use-layer-wise-param-layout', help='--use-layer-wise-param-layout is ..')"
    )
    assert not has_compact_layout(str(tmp_path))
    parser.write_text('group.add_argument(\n    "--use-layer-wise-param-layout", action="store_true")')
    assert has_compact_layout(str(tmp_path))
    # The installed release asks for the other one.
    assert not has_compact_layout(None)


def test_only_megatrons_own_flags_and_devices_need_the_probe() -> None:
    assert not needs_probe(CONFIG, here=True)
    for word in ("megatron.args.x=1", "device=cuda", "megatron.path=/x"):
        assert needs_probe(compose("tiny", [word]).config, here=True)
    assert not needs_probe(compose("tiny", ["device=cuda"]).config, here=False)
    assert not needs_probe(compose("tiny", ["megatron.args.recompute-method=uniform"]).config, here=True)


GOOD = {"megatron_version": "0.19.2", "flags": {"--lr": {}}, "torch_version": "2", "problems": []}


def counting_probe(tmp_path: Path, answer: dict[str, object]) -> tuple[list[str], Path]:
    """Return a command that says `answer` and adds a line to a file each time it runs."""
    runs = tmp_path / "runs"
    script = f"open({str(runs)!r}, 'a').write('x'); print({json.dumps(answer)!r})"
    return [sys.executable, "-c", script], runs


def test_a_kept_answer_is_used_until_a_file_of_the_software_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "site" / "megatron" / "core" / "config.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    command, runs = counting_probe(tmp_path, GOOD)
    cache = tmp_path / "cache" / "probe.json"
    first, second = (ask_megatron(command=command, cache=cache) for _ in range(2))
    assert first.megatron == second.megatron
    assert runs.read_text() == "x"
    source.write_text("a = 22")
    ask_megatron(command=command, cache=cache)
    assert runs.read_text() == "xx"
    os.utime(source, ns=(1, 1))
    ask_megatron(command=command, cache=cache)
    assert runs.read_text() == "xxx"
    checkout = tmp_path / "checkout" / "megatron" / "core"
    checkout.mkdir(parents=True)
    (checkout / "config.py").touch()
    ask_megatron(str(tmp_path / "checkout"), command=command, cache=cache)
    assert runs.read_text() == "xxxx"


def test_a_kept_answer_is_used_from_any_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, runs = counting_probe(tmp_path, GOOD)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.syspath_prepend(str(tmp_path / name))
        ask_megatron(command=command, cache=tmp_path / "probe.json")
    assert runs.read_text() == "x"


def test_failing_answers_are_asked_for_again(tmp_path: Path) -> None:
    command, runs = counting_probe(tmp_path, GOOD | {"muon_problems": [{"what": "a stub.", "fix": ""}]})
    for _ in range(2):
        assert ask_megatron(command=command, cache=tmp_path / "probe.json").muon_problems
    assert runs.read_text() == "xx"


def test_gpus_are_counted_anew_for_a_kept_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, _ = counting_probe(
        tmp_path, GOOD | {"torch_cuda": "13.0", "cuda_available": True, "num_gpus": 8}
    )
    assert ask_megatron(command=command, cache=tmp_path / "probe.json").num_gpus == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    kept = ask_megatron(command=command, cache=tmp_path / "probe.json")
    assert (kept.num_gpus, kept.cuda_available) == (0, False)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "[" * 5000, '{"KEY": 3}', '{"KEY": {"megatron_version": 7, "flags": 3}}', "\xff"],
)
def test_a_damaged_cache_is_asked_past(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "probe.json"
    cache.write_text(content.replace("KEY", probe_cache.fingerprint(["", *sys.path])), encoding="latin-1")
    cache.chmod(0o600)
    command, runs = counting_probe(tmp_path, GOOD)
    report = ask_megatron(command=command, cache=cache)
    assert report.megatron is not None
    assert report.megatron.flags == {"lr": FlagFacts()}
    assert runs.read_text() == "x"


def test_a_cache_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    cache = tmp_path / "probe.json"
    command, runs = counting_probe(tmp_path, GOOD)
    ask_megatron(command=command, cache=cache)
    cache.chmod(0o666)
    ask_megatron(command=command, cache=cache)
    assert runs.read_text() == "xx"
    assert cache.stat().st_mode & 0o777 == 0o600


def test_a_cache_that_cannot_be_written_costs_an_answer_no_more_than_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command, _ = counting_probe(tmp_path, GOOD)
    assert ask_megatron(command=command, cache=tmp_path / "file" / "probe.json").problems == ()


def test_only_the_newest_answers_are_kept(tmp_path: Path) -> None:
    cache = tmp_path / "probe.json"
    for number in range(9):
        probe_cache.store(cache, f"key{number}", {"number": number})
    assert list(json.loads(cache.read_text())) == ["key5", "key6", "key7", "key8"]
    assert [path.name for path in tmp_path.iterdir()] == ["probe.json"]


def test_the_cache_lies_in_the_users_cache_folder() -> None:
    assert probe_cache.cache_file({"XDG_CACHE_HOME": "/c"}) == Path("/c/muon-offload/probe.json")
    assert probe_cache.cache_file({"HOME": "/h"}) == Path("/h/.cache/muon-offload/probe.json")
    assert probe_cache.cache_file({"XDG_CACHE_HOME": "c"}) is None


def test_values_of_another_type_than_expected_count_as_not_known() -> None:
    odd = {
        "megatron_version": 3,
        "flags": {"x": 1},
        "newton_schulz": [1],
        "num_gpus": "2",
        "problems": {"a": 1},
    }
    report = read_answer(odd | {"torch_version": None, "adaptive_muon": 4, "cuda_available": 1})
    assert report.megatron is not None
    assert (report.megatron.flags, report.megatron.newton_schulz, report.megatron.version) == (None, {}, None)
    assert (report.num_gpus, report.cuda_available, report.problems) == (None, None, ())
