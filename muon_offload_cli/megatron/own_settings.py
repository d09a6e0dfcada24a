"""Going on with this run's learning rate, weight decay and momentum, not those of the checkpoint.

Megatron tells saved parameter groups apart by their values, learning rate and weight decay among them, so
that a run with another learning rate finds no group of its own (`param_group_identifier_keys` in
megatron/core/optimizer/optimizer.py); and a saved momentum overrules the one that the run was given.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from muon_offload_cli.megatron.substitute import Substitutions

KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")
"""What a group is, whatever the values of its run."""

NOT_SETTINGS = ("params", "step")


def keep_own_settings(stack: Substitutions) -> None:
    """Let optimizers take state, but not settings, from a checkpoint until `stack` is closed."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    for owner in (DistributedOptimizer, Float16OptimizerWithFloat16Params):
        _replace_load(stack, owner)


def _replace_load(stack: Substitutions, owner: Any) -> None:
    load = owner.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        saved = state_dict.get("optimizer", {}).get("param_groups")
        if saved:
            adopt_settings(saved, self.optimizer.param_groups)
        load(self, state_dict)

    stack.replace(owner, "load_state_dict", load_state_dict)


def adopt_settings(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> None:
    """Put the settings of `current` groups into the `saved` groups of the same kind.

    A kind that occurs twice on one side stays as it was saved: only their values tell such groups apart.
    """
    current_kinds = Counter(map(kind_of, current))
    saved_kinds = Counter(map(kind_of, saved))
    for group in current:
        kind = kind_of(group)
        if current_kinds[kind] != 1 or saved_kinds[kind] != 1:
            continue
        mine = {key: value for key, value in group.items() if key not in NOT_SETTINGS}
        next(each for each in saved if kind_of(each) == kind).update(mine)


def kind_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a group from others but for the values of its run."""
    # Earlier versions saved the first two under other names.
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in KIND)
