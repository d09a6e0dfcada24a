"""State in host memory as Megatron's checkpointing needs to see it: without a copy, wherever it lies.

Three things stand in the way:

- SwiGLU's first matrix is saved as two tensors, made from one by a factory (`apply_swiglu_sharded_factory` in
  megatron/core/transformer/mlp.py). The halves are views of a larger storage, which the writer clones before
  it writes (strategies/filesystem_async.py in megatron/core/dist_checkpointing): here each has a storage of
  its own size over the same bytes.
- That factory concatenates loaded halves into a new tensor: here those loaded in place are merged by showing
  the whole.
- The same matrix of several layers, or of several experts, is one tensor of the checkpoint, and torch demands
  that all of its parts be page-locked or none (`ShardedTensor._init_from_local_shards_and_global_metadata`).
  The tiers differ in that: host memory is page-locked, files and the device are not. Here no part says it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


class UnpinnedView(torch.Tensor):
    """A host tensor, and what is made of it, that does not tell whether its memory is page-locked.

    Pickled, it is a plain tensor: checkpoints know nothing of this class.
    """

    def is_pinned(self, device: Any = None) -> bool:
        """Return False, whatever lies below."""
        return False

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def checkpoint_views(state: Any) -> Any:
    """Return a sharded state dict whose host tensors are saved and loaded where they lie.

    Args:
        state: Nested dicts and lists with Megatron's sharded objects at the leaves; not changed.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(state, dict):
        return {key: checkpoint_views(value) for key, value in state.items()}
    if isinstance(state, list):
        return [checkpoint_views(value) for value in state]
    if isinstance(state, ShardedTensor) and _on_host(state.data):
        return replace(state, data=state.data.as_subclass(UnpinnedView))
    if isinstance(state, ShardedTensorFactory) and _in_one_piece(state.data):
        return _with_halves_in_place(state)
    return state


def _with_halves_in_place(factory: Any) -> Any:
    whole = factory.data
    addresses: list[int] = []

    def build(*arguments: Any) -> Any:
        parts = factory.build_fn(*arguments)
        addresses.clear()
        if not isinstance(parts, list):
            return parts
        for part in parts:
            if _in_one_piece(part.data):
                part.data = _exact_storage(part.data).as_subclass(UnpinnedView)
                addresses.append(part.data.data_ptr())
        return parts

    def merge(parts: Any) -> Any:
        in_place = isinstance(parts, list) and addresses == [part.data_ptr() for part in parts]
        return whole if in_place else factory.merge_fn(parts)

    return replace(factory, build_fn=build, merge_fn=merge)


def _exact_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same bytes whose storage is no larger than itself."""
    array = tensor.detach().numpy()
    return torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)


def _on_host(data: Any) -> bool:
    return torch.is_tensor(data) and data.device.type == "cpu"


def _in_one_piece(data: Any) -> bool:
    return _on_host(data) and data.is_contiguous() and data.numel() > 0
