"""Composing: what is shipped composes, and every way to ask wrongly is told in one line each."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import MISSING

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.from_hf import PART
from muon_offload_cli.config.keys import leaf_types
from muon_offload_cli.config.locations import find_recipes, group_options, shipped_directory
from muon_offload_cli.config.overrides import sort_overrides, split_recipe
from muon_offload_cli.config.schema import Config, DataSource, Engine
from muon_offload_cli.errors import Problem, UserError

PARTS = sorted(
    path.relative_to(shipped_directory("conf")) for path in shipped_directory("conf").rglob("*.yaml")
)
RECIPES = sorted(shipped_directory("recipes").rglob("*.yaml"))
MINIMAL = """
defaults: [model: tiny_dense, data: mock]
train: {steps: 3, sequence_length: 8, global_batch: 2}
optimizer: {lr: 1e-3}
"""


def problems_of(recipe: str, *overrides: str) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        compose(recipe, overrides)
    for problem in caught.value.problems:
        assert problem.what
        assert "\n" not in problem.what + problem.fix
        assert "append" not in problem.what + problem.fix
    return caught.value.problems


def recipe_file(folder: Path, text: str | bytes, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_composes_and_describes_itself(path: Path) -> None:
    by_name, by_path = compose(path.stem), compose(str(path))
    assert by_name == by_path
    assert by_name.config.recipe == path.stem
    assert by_name.config.description


@pytest.mark.parametrize("path", PARTS, ids=str)
def test_every_part_is_an_option_of_a_group_and_holds_only_keys_of_it(path: Path, tmp_path: Path) -> None:
    group, option = path.parent.name, path.stem
    assert option in group_options()[group]
    folder = Path(__file__).parent / "hf" / "qwen3_4b"
    more = [f"model.from_hf={folder}"] if option == PART else []
    composition = compose(recipe_file(tmp_path, MINIMAL), [f"{group}={option}", *more])
    chosen = getattr(composition.config, group)
    for key, value in yaml.safe_load((shipped_directory("conf") / path).read_text()).items():
        found = getattr(chosen, key)
        if not isinstance(value, dict) and value != MISSING:
            assert getattr(found, "name", found) == value


def test_overrides_win_over_the_recipe_which_wins_over_its_parts(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, MINIMAL + "model: {num_layers: 7, hidden_size: 64}\n")
    config = compose(recipe, ["model.hidden_size=32"]).config
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (7, 32, 8)


def test_later_overrides_win_over_earlier_ones() -> None:
    assert compose("tiny", ["train.steps=1", "train.steps=2"]).config.train.steps == 2


def test_parts_can_be_chosen_on_the_command_line_also_where_the_recipe_names_none(tmp_path: Path) -> None:
    config = compose("tiny", ["data=text", "data.paths=[/a b,c]", "offload=none"]).config
    assert config.data.source is DataSource.text
    assert config.data.paths == ["/a b", "c"]
    assert config.offload.engine is Engine.none
    assert compose(recipe_file(tmp_path, MINIMAL), ["offload=mapped"]).config.offload.engine is Engine.mapped


def test_a_recipe_of_the_users_own_is_found_by_name_in_a_folder_and_may_choose_parts(tmp_path: Path) -> None:
    recipe_file(tmp_path, MINIMAL.replace("mock", "text"), "tiny.yaml")
    config = compose("tiny", [], [tmp_path]).config
    assert config.data.source is DataSource.text
    assert config.train.steps == 3
    assert find_recipes([tmp_path])["tiny"].parent == tmp_path


def test_written_keys_are_those_of_the_recipe_file_and_the_command_line_alone(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, MINIMAL)
    written = compose(recipe, ["offload=host", "optimizer.name=muon", "megatron.args.a-b=1"]).written
    # Not the recipe's optimizer.lr: the command line chose another optimizer.
    assert written == {
        "train.steps",
        "train.sequence_length",
        "train.global_batch",
        "optimizer.name",
        "megatron.args.a_b",
    }


def test_a_recipes_keys_count_as_written_until_the_command_line_replaces_their_choice() -> None:
    assert "offload.chunk_mb" in compose("tiny").written
    assert "offload.chunk_mb" in compose("tiny", ["offload.windows=4"]).written
    assert "offload.chunk_mb" not in compose("tiny", ["offload=none"]).written
    assert "offload.chunk_mb" not in compose("tiny", ["offload.engine=host"]).written
    assert "offload.chunk_mb" in compose("tiny", ["offload=none", "offload.chunk_mb=1"]).written


def test_megatron_flags_may_be_written_as_megatron_writes_them(tmp_path: Path) -> None:
    recipe = recipe_file(
        tmp_path, MINIMAL + "megatron: {args: {attention-dropout: 0.5, list-flag: [1, 2]}}\n"
    )
    args = compose(
        recipe, ["megatron.args.--recompute-granularity=full", "megatron.args.x=true"]
    ).config.megatron.args
    assert args == {"attention_dropout": 0.5, "list_flag": [1, 2], "recompute_granularity": "full", "x": True}


def test_environment_variables_can_be_used_in_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVE", "/mnt/nvme0")
    assert compose("tiny", ["offload.directory=${oc.env:DRIVE}/a"]).config.offload.directory == [
        "/mnt/nvme0/a"
    ]


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("optimzer.lr=1", "optimizer.lr"),
        ("train.stpes=1", "train.steps"),
        ("lr=1", "optimizer.lr"),
        ("chunk_mb=1", "offload.chunk_mb"),
        ("offload.engin=disk", "offload.engine"),
        ("dtaa=text", "data"),
        ("data=txt", "data=text"),
        ("offload=dsk", "offload=disk"),
        ("offload.engine=dsik", "offload.engine=disk"),
        ("data@x=text", "data"),
    ],
)
def test_a_misspelled_key_or_part_is_answered_with_the_nearest_one(word: str, suggestion: str) -> None:
    (problem,) = problems_of("tiny", word)
    assert suggestion in problem.fix


def test_three_misspelled_keys_give_three_problems_next_to_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, MINIMAL + "modle: {num_layers: 3}\n")
    problems = problems_of(recipe, "optimzer.lr=1", "train.stpes=1", "ofload=disk")
    assert [problem.keys[0] for problem in problems] == ["train.stpes", "ofload", "optimzer.lr", "modle"]


def test_a_misspelt_section_of_a_recipe_is_told_once_with_a_command_that_corrects_it(tmp_path: Path) -> None:
    section = "trian:\n  seed: 3\n  micro_batch: 1\n  stepz: 4\nmodel: {mo: {topk: 1, num_experts: 2}}\n"
    recipe = recipe_file(tmp_path, MINIMAL + section)
    whole, key, inner = problems_of(recipe)
    assert whole.what == f"there is no section 'trian' in {recipe}: train is meant."
    assert "there is no key 'train.stepz'" in key.what
    assert inner.what == f"there is no section 'model.mo' in {recipe}: model.moe is meant."
    assert inner.fix == "write moe in the place of mo"
    assert whole.fix == "move what stands below trian to train"
    (quoted,) = problems_of(recipe_file(tmp_path, MINIMAL.replace("train:", '"trian":')))
    assert quoted.fix == "write train in the place of trian"
    alone = recipe_file(tmp_path, MINIMAL.replace("train:", "trian:"))
    (whole,) = problems_of(alone)
    subprocess.run(shlex.split(whole.fix), check=True)
    assert compose(alone).config.train.steps


def test_words_of_a_misspelt_section_are_told_once_with_words_that_can_be_pasted() -> None:
    (problem,) = problems_of("tiny", "trian.steps=3", "trian.seed=5", "trian.seed=x y")
    assert (
        problem.what == "there is no section 'trian' (trian.steps, trian.seed, trian.seed): train is meant."
    )
    assert problem.fix == "train.steps=3 train.seed=5 'train.seed=x y'"


@pytest.mark.parametrize(
    ("word", "words_of_what"),
    [
        ("+train.steps=3", "cannot be added"),
        ("++train.steps=3", "cannot be added"),
        ("+new.key=3", "cannot be added"),
        ("~train.steps", "cannot be deleted"),
        ("~data", "cannot be deleted"),
        ("hydra.run.dir=/x", "Hydra's own settings"),
        ("hydra/launcher=x", "Hydra's own settings"),
        ("+hydra.verbose=true", "cannot be added"),
        ("train.steps", "no key=value"),
        ("=3", "no key before"),
        ("train=3", "is a section"),
        ("model.moe={topk: 1}", "is a section"),
        ("megatron.args={a: 1}", "is a section"),
        ("data={source: text}", "takes the name of a part"),
        ("train.steps=1,2", "several values"),
        ("train.steps=choice(1,2)", "several values"),
        ("train.steps=range(1,4)", "several values"),
        ("train.steps=[", "malformed"),
        ("train.steps=int(x)", "malformed"),
        ("train.steps=" + "9" * 5000, "malformed"),
        ("offload.directory=/tmp/ü", "malformed"),
        ("train.steps=many", "takes a whole number"),
        ("train.steps=1.5", "takes a whole number"),
        ("train.steps=", "takes a whole number"),
        ("train.steps=null", "takes a whole number"),
        ("train.steps=[1]", "takes a whole number"),
        ("model.swiglu=perhaps", "takes true or false"),
        ("optimizer.lr=fast", "takes a number"),
        ("data.paths=/a", "takes a list"),
        ("offload.engine=null", "takes one of none, host, mapped, disk"),
        ("offload.directory=${oc.env:NO_SUCH_VARIABLE_HERE}", "cannot be resolved"),
        ("offload.directory=${offload.directory}", "cannot be resolved"),
        ("train.steps=???", "has no value"),
        ("model.name=" + "x" * 20000, "too long"),
        ("megatron.args.=3", "no key"),
    ],
)
def test_each_kind_of_wrong_word_is_told_as_one_problem(word: str, words_of_what: str) -> None:
    (problem,) = problems_of("tiny", word)
    assert words_of_what in problem.what
    assert problem.fix
    assert len(problem.what) < 700


def test_the_fix_of_a_value_that_needs_quotes_can_be_pasted() -> None:
    value = '/tmp/ü "x" (1)'
    (problem,) = problems_of("tiny", f"offload.directory={value}")
    assert compose("tiny", shlex.split(problem.fix)).config.offload.directory == [value]


@pytest.mark.parametrize(
    "word",
    [
        "~train.steps",
        "~data",
        "~checkpoint.keep",
        "~megatron.args.a",
        "++train.steps=3",
        "train.steps=null",
        "checkpoint.keep=many",
        "optimizer.lr=fast",
        "model.swiglu=perhaps",
        "offload.directory=[/a,]",
        "megatron.script_args=[null,{a: 1}]",
    ],
)
def test_the_fix_of_a_refused_word_can_be_pasted(word: str) -> None:
    (problem,) = problems_of("tiny", word)
    assert compose("tiny", shlex.split(problem.fix))


def test_what_cannot_be_added_is_answered_with_the_nearest_key_if_there_is_no_such() -> None:
    (problem,) = problems_of("tiny", "+train.stepps=3")
    assert problem.fix == "train.steps=..."
    (problem,) = problems_of("tiny", "+foo.bar=3")
    assert "there is no key 'foo.bar'" in problem.what
    assert problem.fix.startswith("keys start with")


def test_items_that_are_no_texts_are_told_and_not_the_list() -> None:
    (problem,) = problems_of("tiny", "megatron.script_args=[null,{a: 1}]")
    assert "the items of its list are texts" in problem.what


def test_a_directory_is_one_text_or_a_list_and_a_sweep_is_told_to_be_one() -> None:
    assert compose("tiny", ["offload.directory=/a"]).config.offload.directory == ["/a"]
    assert compose("tiny", ["offload.directory=[/a,/b]"]).config.offload.directory == ["/a", "/b"]
    (problem,) = problems_of("tiny", "offload.directory=/a,/b")
    assert compose("tiny", shlex.split(problem.fix)).config.offload.directory == ["/a", "/b"]
    (problem,) = problems_of("tiny", "offload.directory={a: 1}")
    assert "a text, or a list, [a,b], or null" in problem.what
    (problem,) = problems_of("tiny", "data.paths=[/ü,/a b]")
    assert compose("tiny", shlex.split(problem.fix)).config.data.paths == ["/ü", "/a b"]


@pytest.mark.parametrize(
    ("text", "words_of_what"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n", "is a list"),
        ("word\n", "a single value"),
        ("3\n", "a single value"),
        ("a: [1\n", "mine.yaml:2:1: malformed YAML"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("\ta: 1\n", "mine.yaml:1:1: malformed YAML"),
        (b"\xff\xfe", "no UTF-8"),
        ("a: \x01\n", "malformed YAML"),
        ("[" * 20000, "nested too deeply"),
        ("a: !!python/object/apply:os.getcwd []\n", "malformed YAML"),
        ("train: {steps: " + "9" * 5000 + "}\n", "malformed YAML"),
        ("defaults: {model: tiny_moe}\n", "is no list"),
        ("x" * 2**20 + "y", "larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_recipe_is_told_with_its_place(
    text: str | bytes, words_of_what: str, tmp_path: Path
) -> None:
    (problem,) = problems_of(recipe_file(tmp_path, text))
    assert words_of_what in problem.what
    assert str(tmp_path) in problem.what


def test_wrong_parts_keys_and_values_of_a_recipe_are_told_at_once(tmp_path: Path) -> None:
    text = "defaults: [modle: x]\nfoo: 1\ntrain: {steps: abc, stepz: 3}\noptimizer: {lr: fast}\n"
    problems = problems_of(recipe_file(tmp_path, text), "train.seed=x", "optimizer.lr=1e-3")
    assert {key for problem in problems for key in problem.keys} == {
        "modle",
        "foo",
        "train.steps",
        "train.stepz",
        "train.seed",
    }


def test_wrong_entries_below_defaults_are_all_told(tmp_path: Path) -> None:
    text = "defaults: [modell: tiny_moe, model: tiny_meo, x, {a: 1, b: 2}, data: text, data: mock, _self_]\n"
    whats = [problem.what for problem in problems_of(recipe_file(tmp_path, text))]
    assert len(whats) == 5
    assert "Did you mean model?" in whats[0]
    assert "Did you mean tiny_moe?" in whats[1]
    assert "chosen twice" in whats[4]


def test_missing_mandatory_values_are_all_told(tmp_path: Path) -> None:
    problems = problems_of(recipe_file(tmp_path, "defaults: [model: tiny_moe]\ndescription: x\n"))
    keys = {problem.keys[0] for problem in problems}
    assert keys == {"train.steps", "train.sequence_length", "train.global_batch", "optimizer.lr"}


def test_a_part_that_the_recipe_file_overrides_is_not_dropped_in_silence(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, MINIMAL + "data: {source: stdlib}\n")
    (problem,) = problems_of(recipe, "data=mock")
    assert problem.fix == "data.source=mock"
    assert compose(recipe, ["data=mock", problem.fix]).config.data.source is DataSource.mock


@pytest.mark.parametrize(
    ("recipe", "near"),
    [("tinny", "tiny"), ("gpt2b9", "gpt_2b9"), ("/no/such.yaml", ""), ("zzz", ""), ("", "")],
)
def test_an_unknown_recipe_lists_the_nearest(recipe: str, near: str) -> None:
    (problem,) = problems_of(recipe)
    assert f"recipe={near}" in problem.fix


def test_a_recipe_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        compose("tiny", [], [tmp_path / "missing"])


@pytest.mark.parametrize("words", [["train.steps=3"], ["recipe="], ["recipe=a", "recipe=b"]])
def test_a_command_line_names_exactly_one_recipe(words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        split_recipe(words, ["tiny", "other"])
    assert "recipe" in caught.value.problems[0].what


def test_the_recipe_may_stand_anywhere_in_the_command_line() -> None:
    assert split_recipe(["a=1", "recipe=x=y", "b=2"]) == ("x=y", ["a=1", "b=2"])


words = st.one_of(
    st.builds("{}={}".format, st.sampled_from(sorted(leaf_types())), st.text(max_size=30)),
    st.builds("{}={}".format, st.sampled_from(sorted(group_options())), st.text(max_size=10)),
    st.text(max_size=40),
    st.builds("{}{}".format, st.sampled_from(["+", "~", "hydra.", "megatron.args."]), st.text(max_size=20)),
)


@settings(max_examples=60)
@given(st.lists(words, max_size=5))
def test_random_words_compose_or_are_refused_with_problems(overrides: list[str]) -> None:
    try:
        composition = compose("tiny", overrides)
    except UserError as error:
        assert error.problems
    else:
        assert isinstance(composition.config, Config)


def test_ten_thousand_overrides_are_sorted() -> None:
    asked = sort_overrides([f"train.steps={number}" for number in range(10_000)], group_options())
    assert asked.values == {"train.steps": 9_999}
    assert asked.problems == []
