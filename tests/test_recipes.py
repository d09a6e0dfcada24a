"""Every shipped recipe: it composes, passes the gates of its own cluster, and says what was run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from muon_offload_cli.cli import main
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.from_hf import PART
from muon_offload_cli.config.locations import find_recipes, group_options
from muon_offload_cli.config.rules import check, refuses
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.sources import notes_of, sources_of
from muon_offload_cli.errors import Level

RECIPES = find_recipes()
REAL = sorted(set(RECIPES) - {"tiny"})
MODELS = sorted(group_options()["model"])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_no_gate_has_an_error_or_a_warning_on_its_own_cluster(name: str) -> None:
    composition = compose(name)
    problems = check(composition.config, composition.written, MachineFacts(), here=False)
    assert not refuses(problems)
    assert not [problem for problem in problems if problem.level is Level.WARNING]


@pytest.mark.parametrize("name", REAL)
def test_a_recipe_fills_the_nodes_of_the_cluster_that_it_names(name: str) -> None:
    config = compose(name).config
    assert config.cluster.name in group_options()["cluster"]
    assert config.launcher.ranks_per_node == config.cluster.gpus_per_node


@pytest.mark.parametrize("name", REAL)
def test_a_recipe_says_what_was_run_and_what_was_not(name: str) -> None:
    notes = " ".join(notes_of(RECIPES[name]))
    assert "run on" in notes.lower()


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("tiny", "gpt", PART))])
def test_every_number_of_a_real_model_names_its_source(name: str) -> None:
    path = group_options()["model"][name]
    assert "https://huggingface.co/" in " ".join(notes_of(path))
    bare = []
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        is_value = bool(value.strip()) and not line.startswith("#")
        plain = key.strip() in ("name", "multi_latent_attention") or yaml.safe_load(line) == {
            key.strip(): None
        }
        if is_value and " # " not in line and not plain:
            bare.append(line)
    assert bare == []


def test_the_sources_of_a_recipe_are_its_file_and_its_parts() -> None:
    sources = sources_of(RECIPES["qwen35_35b"])
    assert sources[0].path == RECIPES["qwen35_35b"]
    assert {"model: qwen35_35b", "parallel: tp2_ep4", "cluster: gb300_x4"} <= {s.role for s in sources}


def test_a_recipe_is_shown_with_its_sources_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes", "qwen35_35b"]) == 0
    shown = capsys.readouterr().out
    assert "https://huggingface.co/Qwen/Qwen3.5-35B-A3B" in shown
    assert "linear_num_value_heads: 32" in shown
    plan = shown.split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in plan] == ["model", "heaviest rank", "heaviest node"]
    assert "35,505,251,456 parameters" in plan[0]
    assert "257.11 GiB on disk" in plan[2]


def test_a_recipe_that_the_rules_refuse_is_shown_without_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(RECIPES["tiny"].read_text() + "parallel: {ep: 3}\n")
    assert main.run(["recipes", str(mine)]) == 0
    shown = capsys.readouterr().out
    assert f"no plan: muon-offload check-config recipe={mine} says why" in shown
    assert "ep: 3" in shown


def test_a_copied_recipe_composes_to_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.yaml"
    assert main.run(["recipes", "kimi_k2", "--copy", str(target)]) == 0
    assert f"recipe={target}" in capsys.readouterr().out
    copied, shipped = compose(str(target)).config, compose("kimi_k2").config
    copied.recipe = shipped.recipe
    assert copied == shipped


def test_a_copy_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.yaml"
    target.write_text("precious")
    assert main.run(["recipes", "tiny", "--copy", str(target)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert target.read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["recipes", "tny"], "Did you mean tiny?"),
        (["recipes", "--copy", "x.yaml"], "needs the name of a recipe"),
        (["recipes", "tiny", "--copy", "/nonexistent/x.yaml"], "cannot be written"),
    ],
)
def test_what_cannot_be_shown_or_copied_is_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(words) == 2
    assert told in capsys.readouterr().err
