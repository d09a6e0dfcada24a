"""Checkpointing split parameters from where their bytes lie, without a copy.

Megatron saves SwiGLU's first matrix as two tensors, made from one by a factory
(megatron/core/dist_checkpointing/mapping.py, `ShardedTensorFactory`). Two things cost a copy of it in host
memory: the parts are views of a larger storage, which the writer clones before it writes
(strategies/filesystem_async.py), and loaded parts are concatenated into a new tensor. Here each part gets a
storage of its own size over the same bytes, and parts that were loaded in place
are merged by showing the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


def with_exact_halves(state: Any) -> Any:
    """Return a sharded state dict whose factories of host tensors neither clone nor concatenate.

    Args:
        state: Nested dicts and lists with Megatron's sharded objects at the leaves; not changed.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(state, dict):
        return {key: with_exact_halves(value) for key, value in state.items()}
    if isinstance(state, list):
        return [with_exact_halves(value) for value in state]
    if isinstance(state, ShardedTensorFactory) and _is_plain_host_tensor(state.data):
        return _exact(state)
    return state


def _exact(factory: Any) -> Any:
    whole = factory.data
    addresses: list[int] = []

    def build(*arguments: Any) -> Any:
        parts = factory.build_fn(*arguments)
        addresses.clear()
        if not isinstance(parts, list):
            return parts
        for part in parts:
            if _is_plain_host_tensor(part.data):
                part.data = exact_storage(part.data)
                addresses.append(part.data.data_ptr())
        return parts

    def merge(parts: Any) -> Any:
        in_place = isinstance(parts, list) and addresses == [part.data_ptr() for part in parts]
        return whole if in_place else factory.merge_fn(parts)

    return replace(factory, build_fn=build, merge_fn=merge)


def exact_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same bytes whose storage is no larger than itself."""
    array = tensor.detach().numpy()
    return torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)


def _is_plain_host_tensor(data: Any) -> bool:
    return torch.is_tensor(data) and data.device.type == "cpu" and data.is_contiguous() and data.numel() > 0
