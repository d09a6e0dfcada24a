"""Gradients in bf16 that are widened to fp32 a chunk at a time, as their parameters are stepped.

Megatron widens all of them before it takes their norm and clips them (`_copy_model_grads_to_main_grads` of
megatron/core/optimizer/optimizer.py): 4 bytes an element more, at the side of the 2 of the gradient itself.
Here a `LateGradient` takes the place of each copy until its chunk is stepped, and the arithmetic stays as it
was, to the bit:

- The norm is one kernel over the whole list. Those of Transformer Engine and Apex turn each element to fp32
  before they square it, and sum in an order that follows from sizes alone: they are given the bf16 tensors,
  once a small list has had the same norm in both dtypes. torch's fallback takes one tensor after the other,
  each of which is widened for itself.
- Clipping scales every element by one number: it is noted, and done by Megatron's own function when the
  elements are there.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from muon_offload_cli.megatron.substitute import Substitutions

_ALIGNED = 8
"""Bytes to which kernels want a bf16 tensor aligned to sum it as they sum its fp32 copy: four elements."""
_DESCRIBING = frozenset(
    [
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "is_cuda", "requires_grad", "ndim", "grad_fn")
    ]
    + [torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.type]
)


class LateGradient(torch.Tensor):
    """Stands for the fp32 copy of a bf16 gradient; who uses its values gets that copy, for the moment.

    Attributes:
        source: The gradient, in Megatron's buffer.
        clips: Arguments ``max_norm, total_norm`` of every clipping that is still to be done, in order.
    """

    source: torch.Tensor
    clips: list[tuple[Any, Any]]

    @classmethod
    def of(cls, source: torch.Tensor, looks: torch.Tensor) -> LateGradient:
        """Make one of the shape, dtype and device of `looks`, without memory of its own."""
        late = looks.as_subclass(cls)
        late.source, late.clips = source, []
        return late

    def widened(self) -> torch.Tensor:
        """Make the fp32 copy, clipped as far as it should be by now."""
        copy = self.source.float()
        _clip([copy], self.clips)
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what describes the tensor; for anything else give `func` the copy.

        Raises:
            RuntimeError: `func` would change it in place, and the change would be lost.
        """
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach:
            return args[0]
        name = func.__name__
        if (name.endswith("_") and not name.endswith("__")) or name in ("__set__", "__setitem__"):
            raise RuntimeError(f"{name}: a gradient cannot be changed before its chunk is stepped")
        return func(*tree_map(_widened, args), **tree_map(_widened, kwargs or {}))


def _widened(value: Any) -> Any:
    return value.widened() if isinstance(value, LateGradient) else value


def widen(parameters: Iterable[torch.Tensor]) -> None:
    """Give every parameter whose gradient is a late one the copy that it stands for."""
    clipped: dict[tuple[tuple[Any, Any], ...], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        late = parameter.grad
        if isinstance(late, LateGradient):
            parameter.grad = copy = late.source.float()
            clipped[tuple(late.clips)].append(copy)
    for clips, copies in clipped.items():
        _clip(copies, clips)


def _clip(copies: Sequence[torch.Tensor], clips: Sequence[tuple[Any, Any]]) -> None:
    from megatron.core.optimizer import clip_grads

    # By this name it takes the gradients of anything, where `grad` must be that of a CUDA parameter.
    holders = [SimpleNamespace(decoupled_grad=copy) for copy in copies]
    for max_norm, total_norm in clips:
        clip_grads.clip_grad_by_total_norm_fp32(holders, max_norm, total_norm, use_decoupled_grad=True)


def take_late_gradients(stack: Substitutions) -> None:
    """Let Megatron's optimizers take the norm of late gradients, and clip them, until `stack` is closed.

    To count their zeros, which is for looking into a run, they are all widened at once.
    """
    from megatron.core.optimizer import clip_grads, layer_wise_optimizer, optimizer

    norm, clip, count = (
        clip_grads.get_grad_norm_fp32,
        clip_grads.clip_grad_by_total_norm_fp32,
        clip_grads.count_zeros_fp32,
    )

    def get_grad_norm_fp32(grads_for_norm: Any, *args: Any, **kwargs: Any) -> Any:
        return norm(for_norm(grads_for_norm), *args, **kwargs)

    def count_zeros_fp32(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        widen(parameters)
        return count(parameters, *args, **kwargs)

    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: Any, total_norm: Any, use_decoupled_grad: bool = False
    ) -> None:
        now = []
        for parameter in parameters:
            if isinstance(parameter.grad, LateGradient) and not use_decoupled_grad:
                parameter.grad.clips.append((max_norm, total_norm))
            else:
                now.append(parameter)
        if now:
            clip(now, max_norm, total_norm, use_decoupled_grad)

    # Both modules have imported the names by value; nobody else's are touched.
    for module in (optimizer, layer_wise_optimizer):
        stack.replace(module, "get_grad_norm_fp32", get_grad_norm_fp32)
        stack.replace(module, "count_zeros_fp32", count_zeros_fp32)
    stack.replace(optimizer, "clip_grad_by_total_norm_fp32", clip_grad_by_total_norm_fp32)


def for_norm(gradients: Any) -> Any:
    """Return a list of gradients as the function that takes their norm needs it."""
    late = [isinstance(gradient, LateGradient) for gradient in gradients]
    if not any(late) or _norm_takes_one_at_a_time():
        return gradients
    if all(late) and _norm_is_the_same_in_bf16(gradients[0].device):
        return [_aligned(gradient.source) for gradient in gradients]
    return [_widened(gradient) for gradient in gradients]


def _norm_takes_one_at_a_time() -> bool:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    return bool(clip_grads.l2_norm_impl is getattr(utils, "local_multi_tensor_l2_norm", None))


@functools.cache
def _norm_is_the_same_in_bf16(device: torch.device) -> bool:
    """Take a norm of the same numbers in both dtypes: sizes of a whole block, of several, and of odd ends."""
    from megatron.core.optimizer import clip_grads

    generator = torch.Generator(device).manual_seed(1)
    narrow = [
        torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        for size in (65536, 3 * 65536 + 4, 1001, 7)
    ]
    flag = torch.zeros(1, dtype=torch.int, device=device)
    norms = [
        clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, flag, [tensors], False)[0]
        for tensors in (narrow, [tensor.float() for tensor in narrow])
    ]
    return bool(torch.equal(*norms))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % _ALIGNED == 0 and tensor.is_contiguous() else tensor.clone()
