"""Bad input of every kind is refused in its own words, all at once, with exit 2 and no traceback."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from muon_offload_cli.cli import main

RECIPE = "recipe=tiny"


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))


def problems(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    code = main.run(["check-config", *words, "--json"])
    captured = capsys.readouterr()
    assert (code, captured.err) == (2, "")
    found: list[dict[str, object]] = json.loads(captured.out)
    return found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"train:\n  steps: [1\nmodel: x\n", ":3:6: malformed YAML"),
        (b"train: {steps: 1\n", "malformed YAML"),
        (b"a: 1\na: 2\n", "malformed YAML"),
        (b"\ttrain: 1\n", ":1:1: malformed YAML"),
        (b"", "is empty where a mapping is due"),
        (b"# only a comment\n", "is empty where a mapping is due"),
        (b"- a\n- b\n", "is a list where a mapping is due"),
        (b"42\n", "is a single value where a mapping is due"),
        (b"\xff\xfe\x00", "is no UTF-8 text"),
        (b"train: \x00\n", "malformed YAML"),
        (b"a: " + b"[" * 3000, "malformed YAML"),
        (b"train: [1, 2]\n", "train"),
        (b"defaults: 3\n", "'defaults'"),
        (b"defaults:\n  - nonsense: 3\n", "there is no group 'nonsense'"),
        (b"train:\n  stpes: 3\n", "Did you mean train.steps?"),
        (b"x: '" + b"y" * 2_000_000 + b"'", "larger than 1 MiB"),
    ],
)
def test_a_recipe_file_is_refused_by_place_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    found = problems(capsys, f"recipe={path}")
    assert any(words in str(problem["what"]) for problem in found)
    assert any(str(path) in str(problem["what"]) for problem in found)


def test_a_recipe_file_that_cannot_be_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() == 0:
        (tmp_path / "mine.yaml").mkdir()
    else:
        (tmp_path / "mine.yaml").touch(mode=0)
    (problem,) = problems(capsys, f"recipe={tmp_path}/mine.yaml")
    assert "mine.yaml" in str(problem["what"])


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("train.steps=abc", "it takes a whole number"),
        ("train.steps=1.5", "it takes a whole number"),
        ("train.steps=[1]", "it takes a whole number"),
        ("optimizer.lr=fast", "it takes a number"),
        ("run.digest=maybe", "it takes true or false"),
        ("data.paths=3", "it takes a list"),
        ("offload.engine=floppy", "it takes one of none, host, mapped, disk"),
        ("train=3", "is a section"),
        ("recipe=tinny", "recipe"),
        ("+train.steps=3", "keys cannot be added"),
        ("++train.steps=3", "keys cannot be added"),
        ("~train.steps", "keys cannot be deleted"),
        ("~train.steps=3", "keys cannot be deleted"),
        ("hydra.run.dir=/x", "Hydra's own settings have no effect"),
        ("hydra/launcher=x", "Hydra's own settings have no effect"),
        ("hydra=x", "Hydra's own settings have no effect"),
        ("train.steps=1,2", "gives several values"),
        ("train.steps", "is no key=value"),
        ("=3", "no key before the '='"),
        ("träin.stéps=3", "there is no key"),
        ("train.steps=٣٣x", "malformed"),
        ("optimizer.name=\N{SNOWMAN}", "malformed"),
        ('optimizer.name="\N{SNOWMAN}"', "there is no such optimizer"),
        ("offload.directory=\u202e/x", "malformed"),
        ('offload.directory="\u202e/x"', "is no absolute path"),
        ("model.name=a\x1b[31m", "malformed"),
        ("train.steps=" + "9" * 5000, "train.steps="),
        ("optimizer.name=" + "x" * 10_000, "there is no such optimizer"),
        ("optimizer.name=" + "x" * 200_000, "is too long"),
        ("x" * 10_000 + "=3", "there is no key"),
    ],
)
def test_an_override_is_refused_in_its_own_words(
    capsys: pytest.CaptureFixture[str], word: str, words: str
) -> None:
    found = problems(capsys, RECIPE, word) if not word.startswith("recipe=") else problems(capsys, word)
    assert any(words in str(problem["what"]) for problem in found), found
    assert all(len(str(problem["what"])) < 1000 for problem in found)


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("train.steps==3", "train.steps==3 is malformed at =.", "train.steps=3"),
        ("data.paths=/x/d.jsonl", "it takes a list", "data.paths=[/x/d.jsonl]"),
        ("data.paths=null", "it takes a list", "data.paths=[/path/to/file]"),
        ("optimizer.lr=nan", "optimizer.lr=nan is out of range", "optimizer.lr=0.003"),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay=inf is out", "optimizer.weight_decay=0.0"),
        ("cluster.gpus_per_node=-1", "it must be 0 or more", "cluster.gpus_per_node=0"),
        ("offload=none offload.chunk_mb=3", "never reads it", "leave it out, or offload.engine=disk"),
    ],
)
def test_one_thing_wrong_is_told_once_with_a_fix_that_helps(
    capsys: pytest.CaptureFixture[str], word: str, what: str, fix: str
) -> None:
    (problem,) = problems(capsys, RECIPE, *word.split())
    assert what in str(problem["what"])
    assert problem["fix"] == fix


def test_lines_of_one_file_are_told_beside_files_that_cannot_be_read_and_that_there_may_be_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("x\n" * 300)
    (tmp_path / "empty.txt").touch()
    given = f"data.paths=[{tmp_path}/empty.txt,/nope,{tmp_path},{bad}]"
    told = [str(problem["what"]) for problem in problems(capsys, RECIPE, "data=text", given)]
    assert sum(f"{bad} line" in what for what in told) == 10
    assert sum("empty" in what or "/nope" in what or "a folder" in what for what in told) == 3
    assert f"{bad} was not read beyond line 10" in told[-1]
    assert len(told) == 14


def test_an_unknown_recipe_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = problems(capsys, "recipe=tinny")
    assert "Did you mean tiny?" in str(problem["what"])
    assert problem["fix"] == "recipe=tiny"


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("recipe=zzzzzzzz", "there is no such recipe"),
        ("recipe=", "no recipe is given. Recipes: "),
        ("tiny", "no recipe is given: tiny is one, without 'recipe='"),
    ],
)
def test_a_request_without_a_recipe_gets_one_that_runs_everywhere(
    capsys: pytest.CaptureFixture[str], word: str, what: str
) -> None:
    (problem,) = problems(capsys, word, "train.steps=3")
    assert what in str(problem["what"])
    assert problem["fix"] == "recipe=tiny"


def test_a_path_that_is_there_and_no_file_is_told_as_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder,) = problems(capsys, f"recipe={tmp_path}/")
    assert folder["what"] == f"recipe={tmp_path}/: that is no file."
    (missing,) = problems(capsys, f"recipe={tmp_path}/x.yaml")
    assert missing["what"] == f"recipe={tmp_path}/x.yaml: there is no such file."


def test_a_file_without_its_key_is_taken_for_the_recipe_that_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (problem,) = problems(capsys, "train.steps=3", "my own.yaml")
    assert problem["fix"] == "'recipe=my own.yaml'"


def test_everything_that_is_wrong_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["train.steps=abc", "+a=1", "hydra.x=1", "train.stpes=3", "optimizer.lr=nix"]
    assert len(problems(capsys, RECIPE, *bad)) == len(bad)
    mixed = problems(
        capsys, RECIPE, "train.stpes=3", "optimizer.lr=nix", "offload.fraction=2", "parallel.tp=x"
    )
    assert [problem["rule"] for problem in mixed] == ["", "", "", "fraction-range"]
    rules = ["offload.fraction=2", "optimizer.name=soap", "parallel.tp=3", "train.steps=0"]
    found = {str(problem["rule"]) for problem in problems(capsys, RECIPE, *rules)}
    assert {"fraction-range", "optimizer-family", "world-size", "heads-tp", "number-range"} <= found


def test_ten_thousand_overrides_are_read_in_a_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    words = [f"train.steps={number}" for number in range(1, 10_001)]
    assert main.run(["check-config", RECIPE, *words]) == 0
    assert time.process_time() - began < 60
    capsys.readouterr()
    began = time.process_time()
    found = problems(capsys, RECIPE, *(f"train.stpes{number}=1" for number in range(10_000)))
    assert len(found) == 10_000
    assert time.process_time() - began < 150


@pytest.mark.parametrize(
    "words",
    [
        ("data=text", "data.paths=['~nosuch/x']"),
        ("data=indexed", "model.vocab_size=300", "data.prefix='~nosuch/x'"),
        ("megatron.entrypoint='~nosuch/x'",),
        ("model.from_hf='~nosuch/x'",),
        ("resume='~nosuch/x'",),
    ],
)
def test_the_home_of_an_unknown_user_is_no_fault_of_ours(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["check-config", "recipe=tiny", *words]) == 2
    assert "~nosuch/x" in capsys.readouterr().err
