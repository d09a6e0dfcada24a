"""Every rule passes where it should, finds what it should, and its fix makes it pass."""

from __future__ import annotations

import functools
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from muon_offload_cli.config.compose import Composition, compose
from muon_offload_cli.config.keys import is_known
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.rules import (
    DirectoryFacts,
    MachineFacts,
    PlannedFacts,
    Rule,
    all_rules,
    check,
    refuses,
)
from muon_offload_cli.config.rules.directory import FOLDERS
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Level, Problem
from tests.config.rule_cases import CASES
from tests.config.rule_cases.case import NOTHING_KNOWN, TWO, Case, in_folders, on_disk, on_disks
from tests.config.rule_cases.chunks import LARGE_RINGS, TWO_HUNDRED_GB_OF_HOST

IDS = [f"{case.rule}-{number}" for number, case in enumerate(CASES)]


@functools.cache
def composed(words: str) -> Composition:
    return compose("tiny", shlex.split(words))


def composed_run(words: str) -> tuple[Config, frozenset[str]]:
    composition = composed(words)
    return composition.config, frozenset(composition.written)


def rule_named(name: str) -> Rule:
    return next(rule for rule in all_rules() if rule.name == name)


def found_by(case: Case, words: str, facts: MachineFacts) -> list[Problem]:
    composition = composed(words)
    return rule_named(case.rule)(composition.config, composition.written, facts)


def as_overrides(fix: str) -> list[str]:
    """Return the words of a fix that can be pasted, an empty list for one that is a sentence."""
    words = shlex.split(fix)
    pasted = [word for word in words if is_known(word.partition("=")[0]) and not word.endswith("=...")]
    return pasted if len(pasted) == len(words) else []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_finds_the_bad_case_and_passes_the_good_one(case: Case) -> None:
    problems = found_by(case, case.bad, case.bad_facts)
    assert problems
    assert {problem.level for problem in problems} == {case.level}
    assert all(problem.rule == case.rule and problem.what.endswith((".", "?")) for problem in problems)
    assert found_by(case, case.good, case.good_facts) == []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_pasting_the_fix_makes_the_rule_pass(case: Case) -> None:
    for problem in found_by(case, case.bad, case.bad_facts):
        pasted = as_overrides(problem.fix)
        if not pasted:
            # A sentence must not look as if it could be pasted.
            assert not problem.fix or "=" not in problem.fix.split()[0] or problem.fix.endswith("=...")
            continue
        # Facts follow the directory and the plan: another one is judged on a machine that has it.
        follows = problem.fix.startswith(
            (
                "offload.directory=",
                "offload.engine=",
                "offload.host_memory_gb=",
                "offload.staging_mb=",
                *(f"{key}=" for key in FOLDERS),
            )
        )
        facts = case.good_facts if follows else case.bad_facts
        fixed = " ".join([case.bad, *map(shlex.quote, pasted)])
        assert problem.what not in {left.what for left in found_by(case, fixed, facts)}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_pasting_the_fix_makes_no_other_rule_refuse(case: Case) -> None:
    for problem in found_by(case, case.bad, case.bad_facts):
        pasted = as_overrides(problem.fix)
        fixed = " ".join([case.bad, *map(shlex.quote, pasted)])
        before, after = (
            {each.rule for each in refuses(check(*composed_run(words), case.bad_facts), strict=True)}
            for words in (case.bad, fixed)
        )
        assert after <= before, problem.fix


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            "cluster=h200_x1",
            "launcher.ranks_per_node=1 parallel.tp=1 parallel.ep=1 parallel.sequence_parallel=false",
        ),
        ("launcher.ranks_per_node=3", "launcher.ranks_per_node=2 parallel.ep=1"),
        ("parallel.tp=3", "parallel.tp=2"),
        ("parallel.tp=8 launcher.ranks_per_node=8", "parallel.tp=4"),
        ("parallel.tp=2 launcher.ranks_per_node=12 train.global_batch=8", "train.global_batch=12"),
        (
            "launcher.nodes=2 launcher.ranks_per_node=8 cluster=gb300_x4 parallel.tp=8 parallel.ep=1",
            "launcher.ranks_per_node=4 parallel.tp=4",
        ),
    ],
)
def test_layouts_that_cannot_be_are_answered_with_one_whole_set_of_words(words: str, fix: str) -> None:
    found = {problem.fix for problem in refuses(check(*composed_run(words), NOTHING_KNOWN, here=False))}
    assert found == {fix}
    assert refuses(check(*composed_run(f"{words} {fix}"), NOTHING_KNOWN, here=False)) == []


def test_more_ranks_than_gpus_are_answered_also_where_a_parallel_size_is_no_count() -> None:
    (problem,) = rule_named("gpus-per-node")(*composed_run("cluster=h200_x1 parallel.cp=0"), NOTHING_KNOWN)
    assert problem.fix == "launcher.ranks_per_node=1"


def test_every_rule_has_a_case_a_reason_and_its_own_name() -> None:
    names = [rule.name for rule in all_rules()]
    assert len(set(names)) == len(names)
    assert {case.rule for case in CASES} == set(names)
    assert all(rule.reason.endswith(".") for rule in all_rules())


def test_good_recipes_pass_every_rule_when_nothing_is_known_of_the_machine() -> None:
    for recipe in find_recipes():
        composition = compose(recipe)
        found = check(composition.config, composition.written, NOTHING_KNOWN, here=False)
        assert refuses(found, strict=True) == []


def test_what_only_the_machine_can_tell_is_a_note_for_a_run_meant_for_elsewhere() -> None:
    composition = composed("offload.fraction=3")
    facts = on_disk(is_memory=True, kind="tmpfs")
    levels = {p.rule: p.level for p in check(composition.config, composition.written, facts, here=False)}
    assert levels["directory-memory"] is Level.NOTE
    assert levels["fraction-range"] is Level.ERROR


def test_memory_that_is_not_there_is_told_with_what_takes_it_and_what_to_lower() -> None:
    composition = composed("offload.staging_mb=300000")
    (rings,) = rule_named("host-headroom")(composition.config, composition.written, LARGE_RINGS)
    assert "200.00 GiB of it staging rings" in rings.what
    assert rings.fix == "offload.staging_mb=192"
    facts = replace(TWO_HUNDRED_GB_OF_HOST, headroom_bytes=15 * 2**30, memory_limit_bytes=16 * 2**30)
    (budget,) = rule_named("host-headroom")(composition.config, composition.written, facts)
    assert "under its control group's limit of 16.00 GiB" in budget.what
    assert budget.fix == "offload.host_memory_gb=0"


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("optimizer.lr=nan", "optimizer.lr=0.003"),
        ("train.steps=0", "train.steps=30"),
        # The recipe says nothing of these, or null.
        ("launcher.node_rank=-1", "launcher.node_rank=0"),
        ("parallel.etp=0", "parallel.etp=1"),
    ],
)
def test_a_number_out_of_range_is_answered_with_the_recipes_own_where_it_has_one(word: str, fix: str) -> None:
    composition = composed(word)
    problems = check(composition.config, composition.written, NOTHING_KNOWN, own=composition.own)
    assert fix in {problem.fix for problem in problems if problem.rule == "number-range"}


def test_a_number_of_the_recipe_itself_that_is_out_of_range_is_not_offered(tmp_path: Path) -> None:
    text = Path(find_recipes([])["tiny"]).read_text().replace("lr: 3.0e-3", "lr: -1")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    composition = compose(str(recipe), ["optimizer.lr=nan"])
    (problem,) = refuses(check(composition.config, composition.written, NOTHING_KNOWN, own=composition.own))
    assert problem.fix == "optimizer.lr=0.0003"


def test_errors_are_told_before_warnings_and_notes() -> None:
    composition = composed("data=mock offload.chunk_mb=0 offload.windows=0")
    levels = [p.level for p in check(composition.config, composition.written, NOTHING_KNOWN)]
    assert levels == sorted(levels, key=list(Level).index)
    assert set(levels) == set(Level)


def test_a_disk_that_is_too_small_is_told_with_path_needed_and_free_and_does_not_fit() -> None:
    composition = composed("")
    facts = MachineFacts(
        directories=(
            DirectoryFacts(path=Path("/m/s"), nearest=Path("/m"), mount_point=Path("/m"), free_bytes=2**26),
        ),
        planned=PlannedFacts(directory_bytes=(2**28,)),
    )
    (problem,) = refuses(check(composition.config, composition.written, facts))
    assert problem.exit_code == 3
    for words in ("/m/s", "256.00 MiB", "64.00 MiB"):
        assert words in problem.what
    assert "192.00 MiB" in problem.fix


def test_of_several_directories_the_fit_ones_are_the_fix() -> None:
    composition = composed(TWO)
    for name, unfit in {
        "directory-memory": {"is_memory": True},
        "directory-pseudo": {"kind": "proc"},
    }.items():
        facts = on_disks({}, unfit, unfit)
        found = rule_named(name)(composition.config, composition.written, facts)
        assert [problem.fix for problem in found] == ["offload.directory=/d/s"] * 2


def test_every_folder_that_a_run_writes_into_is_judged_by_its_own_key() -> None:
    composition = composed("")
    found = rule_named("directory-pseudo")(composition.config, composition.written, in_folders(kind="proc"))
    assert [problem.keys for problem in found] == [(key,) for key in FOLDERS]
    assert {problem.exit_code for problem in found} == {3}


def test_weights_alone_are_not_judged_by_the_room_that_a_whole_checkpoint_takes() -> None:
    composition = composed("checkpoint.optimizer=false")
    facts = in_folders(free_bytes=9)
    assert rule_named("checkpoint-space")(composition.config, composition.written, facts) == []


def test_an_interval_of_checkpoints_that_go_nowhere_is_told_once() -> None:
    composition = composed("checkpoint.interval=1")
    (problem,) = refuses(check(composition.config, composition.written, NOTHING_KNOWN))
    assert problem.rule == "unused-checkpoint-keys"
