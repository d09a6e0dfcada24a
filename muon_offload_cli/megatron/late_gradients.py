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
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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


_READING = frozenset(
    [torch.norm, torch.linalg.vector_norm, torch.count_nonzero, torch.isnan, torch.isinf, torch.isfinite]
    + [getattr(torch.Tensor, name) for name in ("norm", "count_nonzero", "isnan", "isinf", "isfinite")]
)
"""Functions that keep nothing of what they are given."""


class LateGradient(torch.Tensor):
    """Stands for the fp32 copy of a bf16 gradient.

    Who only reads its values gets a copy for the moment. Anybody else, who may keep a view or write to it,
    makes the copy early: it is the gradient from then on.

    Attributes:
        source: The gradient, in Megatron's buffer.
        clips: Arguments ``max_norm, total_norm`` of every clipping that is still to be done, in order.
        copy: The copy, if somebody has made it early.
    """

    source: torch.Tensor
    clips: list[tuple[Any, Any]]
    copy: torch.Tensor | None

    @classmethod
    def of(cls, source: torch.Tensor, looks: torch.Tensor) -> LateGradient:
        """Make one of the shape, dtype and device of `looks`, without memory of its own."""
        late = looks.as_subclass(cls)
        late.source, late.clips, late.copy = source, [], None
        return late

    def widened(self, *, keep: bool) -> torch.Tensor:
        """Return the fp32 copy, clipped as it should be by now; with `keep` the same one from then on."""
        if self.copy is not None:
            return self.copy
        copy = self.source.float()
        _clip([copy], self.clips)
        self.copy = copy if keep else None
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what describes the tensor; for anything else give `func` the copy."""
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        def widened(value: Any) -> Any:
            return value.widened(keep=func not in _READING) if isinstance(value, LateGradient) else value

        return func(*tree_map(widened, args), **tree_map(widened, kwargs or {}))


def widen(parameters: Iterable[torch.Tensor]) -> None:
    """Give every parameter whose gradient is a late one the copy that it stands for."""
    clipped: dict[tuple[tuple[Any, Any], ...], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        late = parameter.grad
        if isinstance(late, LateGradient):
            parameter.grad = copy = late.source.float() if late.copy is None else late.copy
            if late.copy is None:
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
    """Let Megatron take the norm of late gradients, and clip them, until `stack` is closed.

    To count their zeros, which is for looking into a run, they are all widened at once.
    """
    # Modules that import a function by value have it under its own name.
    from megatron.core.optimizer import clip_grads, layer_wise_optimizer, optimizer  # noqa: F401

    norm, clip, count = (
        clip_grads.get_grad_norm_fp32,
        clip_grads.clip_grad_by_total_norm_fp32,
        clip_grads.count_zeros_fp32,
    )

    def get_grad_norm_fp32(grads_for_norm: Any, norm_type: Any = 2, *args: Any, **kwargs: Any) -> Any:
        if norm_type == 2 and not isinstance(grads_for_norm, torch.Tensor):
            grads_for_norm = for_norm(grads_for_norm)
        return norm(grads_for_norm, norm_type, *args, **kwargs)

    def count_zeros_fp32(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        widen([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        return count(parameters, *args, **kwargs)

    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: Any, total_norm: Any, use_decoupled_grad: bool = False
    ) -> None:
        now = []
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            late = None if use_decoupled_grad else parameter.grad
            if isinstance(late, LateGradient) and late.copy is None:
                late.clips.append((max_norm, total_norm))
            else:
                now.append(parameter)
        if now:
            clip(now, max_norm, total_norm, use_decoupled_grad)

    for original, replacement in (
        (norm, get_grad_norm_fp32),
        (clip, clip_grad_by_total_norm_fp32),
        (count, count_zeros_fp32),
    ):
        _replace_everywhere(stack, original, replacement)


def _replace_everywhere(stack: Substitutions, original: Any, replacement: Any) -> None:
    """Put a function in the place of another in every module that has it, where nobody replaces it again."""
    name = original.__name__

    def put_back(module: Any) -> None:
        if vars(module).get(name) is replacement:
            setattr(module, name, original)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)
            stack.callback(put_back, module)


def for_norm(gradients: Sequence[Any]) -> Sequence[Any]:
    """Return a list of gradients as the function that takes their 2-norm needs it."""
    late = [isinstance(gradient, LateGradient) and gradient.copy is None for gradient in gradients]
    if not any(late) or _norm_takes_one_at_a_time():
        return gradients
    from megatron.core.optimizer import clip_grads

    if all(late) and _norm_is_the_same_in_bf16(clip_grads.l2_norm_impl, gradients[0].device):
        return [_aligned(gradient.source) for gradient in gradients]
    return [
        gradient.widened(keep=False) if isinstance(gradient, LateGradient) else gradient
        for gradient in gradients
    ]


def _norm_takes_one_at_a_time() -> bool:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    return bool(clip_grads.l2_norm_impl is getattr(utils, "local_multi_tensor_l2_norm", None))


@functools.cache
def _norm_is_the_same_in_bf16(kernel: Callable[..., Any], device: torch.device) -> bool:
    """Take a norm of the same numbers in both dtypes: sizes of a whole block, of several, and of odd ends."""
    from megatron.core.optimizer import clip_grads

    generator = torch.Generator(device).manual_seed(1)
    narrow = [
        torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        for size in (65536, 3 * 65536 + 4, 1001, 7)
    ]
    flag = torch.zeros(1, dtype=torch.int, device=device)
    try:
        norms = [
            clip_grads.multi_tensor_applier(kernel, flag, [tensors], False)[0]
            for tensors in (narrow, [tensor.float() for tensor in narrow])
        ]
    except (RuntimeError, TypeError, ValueError):
        # It takes fp32 alone.
        return False
    return bool(torch.equal(*norms))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % _ALIGNED == 0 and tensor.is_contiguous() else tensor.clone()
