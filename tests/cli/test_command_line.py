"""The command line: exit codes, where text goes, and how fast it answers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from muon_offload_cli.cli import main
from muon_offload_cli.cli.problems import exit_code, print_problems
from muon_offload_cli.cli.rules import as_markdown
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.rules import all_rules
from muon_offload_cli.errors import Level, Problem
from muon_offload_cli.version import VERSION
from tests.fakes.fake_torchrun import HANG_S

RECIPE = "recipe=tiny"


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))


def process(
    *arguments: str, text: str = "from muon_offload_cli.cli.main import main; main()"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([RECIPE], 0),
        ([RECIPE, "offload.chunk_mb=0"], 0),
        ([RECIPE, "offload.chunk_mb=0", "--strict"], 2),
        ([RECIPE, "train.stpes=3"], 2),
        ([RECIPE, "launcher.ranks_per_node=3"], 2),
        ([RECIPE, "data=mock", "--strict"], 0),
        (["recipe=tinny"], 2),
        ([], 2),
        ([RECIPE, "--no-such-option"], 2),
        ([RECIPE, "--recipe-dir", "/no/such/folder"], 2),
        (["recipe=gpt_2b9", "device=auto", "--strict"], 0),
    ],
)
def test_check_config_exits_with_what_was_found(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["check-config", *arguments]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("recipe", find_recipes())
def test_every_shipped_recipe_passes_strictly_for_its_own_cluster(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["check-config", f"recipe={recipe}", "--strict"]) == 0, capsys.readouterr().err


def test_a_run_folder_that_train_would_refuse_is_refused_by_a_look_that_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").touch()
    named = [RECIPE, "data=mock", f"run.directory={tmp_path / 'taken'}"]
    told = []
    for command in ("check-config", "train"):
        assert main.run([command, *named]) == 2
        told.append(capsys.readouterr().err.partition("error: ")[2].splitlines()[:2])
    assert told[0] == told[1]
    assert told[0][0] == f"run.directory={tmp_path / 'taken'} is not empty; a run needs a folder of its own."
    monkeypatch.chdir(tmp_path)
    assert main.run(["check-config", RECIPE, "data=mock"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    monkeypatch.chdir("/proc")
    for words in (["check-config"], ["train", "--dry-run"]):
        assert main.run([*words, RECIPE, "data=mock"]) == 3
        assert (
            "run.directory=/proc/runs/tiny is on /proc (proc), which keeps no files"
            in capsys.readouterr().err
        )
    assert main.run(["disk-plan", RECIPE, "data=mock"]) == 0


def test_problems_go_to_standard_error_on_unbroken_lines_and_the_verdict_to_standard_output() -> None:
    long = "/" + "x" * 300
    done = process("check-config", RECIPE, "data=text", f"data.paths=[{long}]")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: data.paths: there is no file {long}.",
        "  fix: correct data.paths, or take data=stdlib",
    ]
    assert done.stdout == "recipe tiny: refused: 1 error\n"


def test_json_gives_the_same_as_data_also_for_errors_of_composing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["check-config", RECIPE, "offload.fraction=2", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)
    assert problem == {
        "rule": "fraction-range",
        "level": "error",
        "keys": ["offload.fraction"],
        "what": "offload.fraction=2 is outside 0 to 1.",
        "fix": "offload.fraction=1.0",
    }
    assert main.run(["check-config", RECIPE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main.run(["check-config", RECIPE, "nonsense=1", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["keys"] == ["nonsense"]
    assert captured.err == ""


def test_a_directory_in_memory_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    assert main.run(["check-config", RECIPE, "offload.directory=/dev/shm/state"]) == 3
    assert "tmpfs" in capsys.readouterr().err
    assert not Path("/dev/shm/state").exists()


def test_a_recipe_for_another_cluster_is_judged_here_only_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["check-config", "recipe=gpt_2b9", "device=auto", "offload.directory=/dev/full/x"]
    assert main.run(words) == 0
    assert "note: offload.directory" in capsys.readouterr().err
    assert main.run([*words, "--here"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [["checkpoints", ""], ["recipes", ""], ["recipes", "tiny", "--copy", ""], ["doctor", "--megatron="]],
)
def test_an_empty_argument_does_not_mean_the_working_folder(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    assert "the argument is empty" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["check-config", RECIPE], ["train", RECIPE, "--dry-run", "--json"]])
def test_a_deleted_working_folder_is_one_sentence(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main.run(arguments) == 2
    captured = capsys.readouterr()
    assert "the folder that you are in was deleted" in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_recipes_are_listed_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("description: |\n  two\n  lines\n")
    assert main.run(["recipes", "--recipe-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(find_recipes([tmp_path]))
    assert next(line for line in lines if line.startswith("mine")).endswith("two lines")


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        ("/no/such/folder/x.yaml", "mkdir -p /no/such/folder"),
        (f"{__file__}/x.yaml", f"--copy {tempfile.gettempdir()}/x.yaml"),
        (__file__, "give a new file"),
    ],
)
def test_a_copy_that_cannot_be_written_is_told_by_what_stands_in_its_way(
    target: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["recipes", "recipe=tiny", "--copy", target]) == 2
    assert f"fix: {fix}\n" in capsys.readouterr().err


def test_a_broken_recipe_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.yaml").write_text("a: [")
    assert main.run(["recipes", "--recipe-dir", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "tiny" in captured.out
    assert "broken.yaml" in captured.err


def test_rules_are_listed_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["rules"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {rule.name for rule in all_rules()}
    assert "builds no layer-wise optimizer" in lines["plain-muon"]


@pytest.mark.parametrize("command", [[], ["train"], ["check-config"], ["doctor"], ["recipes"], ["rules"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*command, "--help"]) == 0
    assert "Usage: muon-offload" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    text = (
        "import sys; from muon_offload_cli.cli.main import run; code = run(['--help']); "
        "heavy = {'torch', 'megatron', 'hydra', 'omegaconf', 'numpy', 'rich.console'} & set(sys.modules); "
        "sys.exit(f'{code} {sorted(heavy)}' if code or heavy else 0)"
    )
    done = process(text=text)
    assert done.returncode == 0, done.stderr


def test_checking_a_recipe_does_not_import_torch() -> None:
    text = (
        "import sys; from muon_offload_cli.cli.main import run; code = run(['check-config', 'recipe=tiny']); "
        "sys.exit(code or 'torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert process(text=text).returncode == 0


def test_an_error_of_ours_keeps_its_traceback_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(main, "app", broken)
    assert main.run(["recipes"]) == 1
    assert "RuntimeError: a bug" in capsys.readouterr().err


def test_an_interrupt_exits_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    assert main.run(["recipes"]) == 130


def test_a_closed_pipe_ends_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", "from muon_offload_cli.cli.main import main; main()", "recipes"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""


@pytest.mark.parametrize("word", ["train.seed=abc", "offload.fraction=2"])
def test_a_reader_that_goes_away_while_errors_are_told_is_no_fault_of_ours(word: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "muon_offload_cli.cli.main", "check-config", RECIPE, word]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=write, timeout=60, check=False)
    os.close(write)
    assert done.returncode == 141


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"muon-offload {VERSION}\n"


def test_a_fix_with_a_path_can_be_pasted_whatever_the_path_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["recipes", "tiny", "--copy", "ü b.yaml"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words == ["muon-offload", "train", "recipe=./ü b.yaml"]
    (tmp_path / "a b").touch(mode=0)
    assert main.run(["check-config", RECIPE, "offload.directory=a b"]) == 2
    fix = next(line for line in capsys.readouterr().err.splitlines() if "fix:" in line)
    (word,) = shlex.split(fix.removeprefix("  fix:"))
    assert compose("tiny", [word]).config.offload.directory == [f"{tmp_path}/a b"]


def test_escape_sequences_in_values_are_made_visible(capsys: pytest.CaptureFixture[str]) -> None:
    print_problems([Problem(what="a\x1b[31mb\nc", fix="d\re")])
    assert capsys.readouterr().err == "error: a\\x1b[31mb\\nc\n  fix: d\\re\n"


def test_not_fitting_wins_over_wrong_and_warnings_count_under_strict() -> None:
    wrong, unfit = Problem(what="a"), Problem(what="b", exit_code=3)
    warning, note = Problem(what="c", level=Level.WARNING, exit_code=3), Problem(what="d", level=Level.NOTE)
    assert exit_code([wrong, unfit, wrong]) == 3
    assert exit_code([warning, note]) == 0
    assert exit_code([warning, note], strict=True) == 2
    assert exit_code([note], strict=True) == 0


def test_the_page_of_rules_is_what_the_code_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "rules.md"
    assert page.read_text() == as_markdown(), "make docs writes it"
    assert all(f"| `{rule.name}` |" in page.read_text() for rule in all_rules())


def _say(arguments: str, redirect: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m muon_offload_cli.cli.main {arguments} {redirect}"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=os.environ | environment, check=False
    )


def test_a_full_drive_under_standard_output_is_one_line() -> None:
    done = _say("recipes", "> /dev/full")
    assert done.returncode == 3
    assert done.stderr == "error: standard output cannot be written: No space left on device.\n"


def test_a_closed_standard_output_is_no_fault() -> None:
    done = _say("recipes", ">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_knows_only_ascii_gets_question_marks() -> None:
    done = _say("disk-plan recipe=tiny", "", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "????" in done.stdout
