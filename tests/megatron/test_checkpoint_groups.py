"""Matching the parameter groups of a checkpoint to those of a run."""

from __future__ import annotations

from typing import Any

from muon_offload_cli.megatron.own_settings import adopt_settings
from muon_offload_cli.megatron.regrouped import matched, regroup


def group(expert: bool = False, **more: Any) -> dict[str, Any]:
    given = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": expert, "is_decoupled_lr": False}
    return {**given, "max_lr": 0.1, "step": 7, **more}


def test_a_run_keeps_its_own_settings_and_the_saved_step() -> None:
    saved = [group(max_lr=0.1, momentum=0.95, params=[1])]
    adopt_settings(saved, [group(max_lr=0.2, momentum=0.9, step=0, params=[9])])
    assert saved == [group(max_lr=0.2, momentum=0.9, step=7, params=[1])]


def test_groups_that_only_values_tell_apart_stay_as_saved() -> None:
    saved = [group(max_lr=0.1), group(max_lr=0.2)]
    adopt_settings(saved, [group(max_lr=0.3), group(max_lr=0.4)])
    assert [each["max_lr"] for each in saved] == [0.1, 0.2]


def test_a_run_without_expert_parallelism_takes_one_group_of_two() -> None:
    saved = [group(expert=True, max_lr=0.3), group(max_lr=0.1)]
    assert matched(saved, [group()]) == [group(max_lr=0.1)]


def test_a_run_with_expert_parallelism_gives_experts_the_one_group_there_is() -> None:
    assert matched([group(max_lr=0.1)], [group(), group(expert=True)]) == [
        group(max_lr=0.1),
        group(expert=True, max_lr=0.1),
    ]


def test_groups_of_no_known_kind_are_left_to_megatron() -> None:
    saved = [group()]
    assert matched(saved, [group(), group(wd_mult=0.0)]) is saved


def test_lists_of_groups_are_found_in_nested_dicts() -> None:
    saved = {"optimizer": {0: {"optimizer": {"param_groups": [group(), group(expert=True)], "state": {}}}}}
    present = {"optimizer": {0: {"optimizer": {"param_groups": [group()], "state": {}}}}, "model": {}}
    regroup(saved, present)
    assert saved["optimizer"][0]["optimizer"]["param_groups"] == [group()]
