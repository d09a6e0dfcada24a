"""Saying which tensors of a checkpoint are not those of the model, before any of them is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.megatron.substitute import Substitutions

SHOWN = 8


def demand_same_tensors(stack: Substitutions, folder: Path) -> None:
    """Let Megatron's load planner compare names, shapes and dtypes of all tensors, until `stack` is closed.

    Its own check stops at the first shape, lets the vocabulary differ, and takes any dtype, which torch then
    converts in silence.
    """
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    def validate(planner: Any, metadata: Any, tensors: Any) -> None:
        differences = []
        # Megatron cuts or pads these to fit; that is another model, since padding is in the softmax.
        padded = getattr(planner, "allow_shape_mismatch_sharded_tensors", None) or {}
        for tensor in [*tensors, *padded.values()]:
            saved = metadata.state_dict_metadata.get(tensor.key)
            if saved is None:
                differences.append(f"{tensor.key} is not in it")
                continue
            if tuple(saved.size) != tuple(tensor.global_shape):
                differences.append(
                    f"{tensor.key} has shape {list(saved.size)}, not {list(tensor.global_shape)}"
                )
            if saved.properties.dtype != tensor.dtype:
                differences.append(
                    f"{tensor.key} is {_short(saved.properties.dtype)}, not {_short(tensor.dtype)}"
                )
        if differences:
            raise UserError(problems=[_problem(folder, list(dict.fromkeys(differences)))])

    stack.replace(MCoreLoadPlanner, "_validate_global_shapes", validate)


def _problem(folder: Path, differences: list[str]) -> Problem:
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return Problem(
        what=f"the checkpoint {folder} is not of this model: {'; '.join(differences[:SHOWN])}{more}.",
        fix="train the model that was saved: the recipe and the model.* values of that run "
        "(rows of the embedding alone: model.make_vocab_size_divisible_by)",
        keys=("resume.source", "model"),
    )


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def first_user_error() -> Iterator[None]:
    """Raise a `UserError` that torch's checkpoint reader carried from some rank to all, as itself."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, UserError):
                raise failure from None
        raise
