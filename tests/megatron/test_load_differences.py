"""Differences between a checkpoint's tensors and the model's are told by name, all at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.load_differences import demand_same_tensors
from muon_offload_cli.megatron.substitute import Substitutions


def saved(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(size=torch.Size(shape), properties=SimpleNamespace(dtype=dtype))


def wanted(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(key=key, global_shape=shape, dtype=dtype)


def validate(there: dict[str, Any], tensors: list[Any], padded: dict[str, Any] | None = None) -> None:
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    planner = SimpleNamespace(allow_shape_mismatch_sharded_tensors=padded)
    with Substitutions() as stack:
        demand_same_tensors(stack, Path("/c/iter_0000004"))
        MCoreLoadPlanner._validate_global_shapes(planner, SimpleNamespace(state_dict_metadata=there), tensors)


def test_tensors_that_agree_are_taken() -> None:
    validate({"a": saved(4, 2), "more": saved(1)}, [wanted("a", 4, 2)])


def test_names_shapes_dtypes_and_padding_are_told_together() -> None:
    there = {"a": saved(4, 2), "b": saved(4, dtype=torch.bfloat16), "embedding": saved(512, 2)}
    tensors = [wanted("a", 4, 3), wanted("b", 4), wanted("c", 1)]
    with pytest.raises(UserError) as raised:
        validate(there, tensors, {"embedding": wanted("embedding", 384, 2)})
    (problem,) = raised.value.problems
    assert problem.what == (
        "the checkpoint /c/iter_0000004 is not of this model: a has shape [4, 2], not [4, 3]; "
        "b is bfloat16, not float32; c is not in it; embedding has shape [512, 2], not [384, 2]."
    )
