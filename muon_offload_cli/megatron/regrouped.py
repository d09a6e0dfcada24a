"""Loading a checkpoint whose parameter groups were cut otherwise.

Experts have a group of their own only under expert parallelism. Megatron merges the saved list of groups into
the present one (megatron/core/dist_checkpointing/serialization.py, `load`) and gives up where their lengths
differ, although a group holds nothing but settings and a step count.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from muon_offload_cli.megatron.own_settings import kind_of
from muon_offload_cli.megatron.substitute import Substitutions

EXPERT = "is_expert_parallel"
GROUPS = "param_groups"


def load_into_present_groups(stack: Substitutions) -> None:
    """Let Megatron's checkpoint reader match saved groups to present ones until `stack` is closed."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization

    load, load_common = dist_checkpointing.load, serialization.load_common_state_dict

    def load_regrouped(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        def common(*arguments: Any, **more: Any) -> Any:
            saved = load_common(*arguments, **more)
            regroup(saved, sharded_state_dict)
            return saved

        with Substitutions() as inner:
            inner.replace(serialization, "load_common_state_dict", common)
            return load(sharded_state_dict, *args, **kwargs)

    stack.replace(dist_checkpointing, "load", load_regrouped)


def regroup(saved: Any, present: Any) -> None:
    """Give every list of groups in `saved` the groups of the same place in `present`; changes `saved`.

    Args:
        saved: Nested dicts as loaded.
        present: Nested dicts of this run.
    """
    if not isinstance(saved, dict) or not isinstance(present, dict):
        return
    for key, value in saved.items():
        if key == GROUPS and isinstance(value, list) and isinstance(present.get(key), list):
            saved[key] = matched(value, present[key])
        else:
            regroup(value, present.get(key))


def matched(saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one saved group for each present one, preferring one of the same kind, expert or not.

    Lists of the same kinds, and groups without a counterpart, are left for Megatron to judge.
    """
    if Counter(map(kind_of, saved)) == Counter(map(kind_of, present)):
        return saved
    found = []
    for group in present:
        like = [each for each in saved if kind_of(each) == kind_of(group)]
        like += [each for each in saved if kind_of({**each, EXPERT: group.get(EXPERT)}) == kind_of(group)]
        if not like:
            return saved
        found.append({**like[0], EXPERT: group.get(EXPERT)})
    return found
