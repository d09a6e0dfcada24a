"""Gradients in bf16 stay so until their chunk is stepped, and nobody sees a difference."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from muon_offload_cli.megatron.cpu_device import cpu_device
from muon_offload_cli.megatron.late_gradients import LateGradient, for_norm, take_late_gradients, widen
from muon_offload_cli.megatron.substitute import Substitutions

SHAPES = [(16, 8), (7, 3), (32,)]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cpu_device():
        yield


@pytest.fixture
def taken() -> Iterator[None]:
    with Substitutions() as stack:
        take_late_gradients(stack)
        yield


def pairs() -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The same parameters with late gradients, and with the copies that Megatron makes."""
    torch.manual_seed(3)
    sources = [torch.randn(shape).bfloat16() for shape in SHAPES]
    late, copied = ([torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES] for _ in range(2))
    for mine, other, source in zip(late, copied, sources, strict=True):
        # As matrices are marked whose parts all count, on whatever rank.
        mine.tensor_model_parallel = other.tensor_model_parallel = True  # type: ignore[attr-defined]
        mine.grad = LateGradient.of(source, mine.data)
        other.grad = source.float()
    return late, copied


def gradients(parameters: list[torch.nn.Parameter]) -> list[Any]:
    return [parameter.grad for parameter in parameters]


def same(late: list[torch.nn.Parameter], copied: list[torch.nn.Parameter]) -> bool:
    assert not any(isinstance(gradient, LateGradient) for gradient in gradients(late))
    return all(map(torch.equal, gradients(late), gradients(copied)))


def test_norm_and_clipping_are_those_of_the_copies(taken: None) -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        late, copied = pairs()
        norms = [optimizer.get_grad_norm_fp32(gradients(each)) for each in (late, copied)]
        assert norms[0] == norms[1] > 1
        # Twice, as for a parameter that two norms are taken of; in this order the roundings differ.
        for most in (0.7, 0.3):
            optimizer.clip_grad_by_total_norm_fp32(late, max_norm=most, total_norm=norms[0])
            clip_grads.clip_grad_by_total_norm_fp32(copied, max_norm=most, total_norm=norms[0])
        assert all(isinstance(gradient, LateGradient) for gradient in gradients(late))
        counted = [optimizer.count_zeros_fp32(each, None) for each in (late, copied)]
        assert counted[0] == counted[1]
    finally:
        torch.distributed.destroy_process_group()
    assert same(late, copied)


def test_only_what_is_widened_has_memory() -> None:
    late, copied = pairs()
    widen(late[:1])
    assert same(late[:1], copied[:1])
    kept = [gradient.source for gradient in gradients(late)[1:]]
    assert [source.dtype for source in kept] == [torch.bfloat16] * 2
    with torch._C.DisableTorchFunctionSubclass():
        # Views of what they look like: here the parameters' own zeros.
        shown = [gradient.untyped_storage().data_ptr() for gradient in gradients(late)[1:]]
    assert shown == [parameter.untyped_storage().data_ptr() for parameter in late[1:]]


def test_who_reads_gets_a_copy_for_the_moment_and_who_keeps_or_writes_has_it_for_good() -> None:
    late, copied = pairs()
    gradient: Any = late[0].grad
    assert (gradient.dtype, gradient.shape, gradient.numel()) == (torch.float32, (16, 8), 128)
    assert torch.equal(torch.norm(gradient), torch.norm(copied[0].grad))  # type: ignore[arg-type]
    assert not gradient.isnan().any()
    assert gradient.copy is None
    changes: list[Callable[[Any], object]] = [
        lambda grad: grad.mul_(0.3),
        lambda grad: grad.data.mul_(0.3),
        lambda grad: grad.view(-1)[:2].zero_(),
        lambda grad: torch.mul(grad, 2, out=grad),
        lambda grad: grad.detach().copy_(grad + 1),
        lambda grad: grad.__setitem__(0, 7.0),
    ]
    for change in changes:
        for parameters in (late, copied):
            change(parameters[0].grad)
        assert torch.equal(gradient.abs(), copied[0].grad.abs())  # type: ignore[union-attr]
    widen(late)
    assert same(late, copied)


def test_a_module_that_has_the_functions_by_name_has_the_new_ones_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.optimizer import clip_grads

    theirs = ModuleType("theirs")
    original = clip_grads.clip_grad_by_total_norm_fp32
    theirs.clip_grad_by_total_norm_fp32 = original  # type: ignore[attr-defined]
    theirs.get_grad_norm_fp32 = clip_grads.get_grad_norm_fp32  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    late, copied = pairs()
    with Substitutions() as stack:
        take_late_gradients(stack)
        theirs.clip_grad_by_total_norm_fp32(late, 0.5, 3.0)
        later = object()
        theirs.get_grad_norm_fp32 = later  # type: ignore[attr-defined]
    original(copied, 0.5, 3.0)
    assert [len(gradient.clips) for gradient in gradients(late)] == [1, 1, 1]
    widen(late)
    assert same(late, copied)
    assert theirs.clip_grad_by_total_norm_fp32 is clip_grads.clip_grad_by_total_norm_fp32 is original
    assert theirs.get_grad_norm_fp32 is later


@pytest.mark.parametrize("same_in_bf16", [True, False])
def test_a_kernel_over_the_list_gets_bf16_only_where_its_norm_is_the_same(
    monkeypatch: pytest.MonkeyPatch, same_in_bf16: bool
) -> None:
    from megatron.core.optimizer import clip_grads

    def kernel(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], _per_tensor: bool) -> Any:
        total = sum((tensor.float() ** 2).sum() for tensor in lists[0])
        return total + (not same_in_bf16 and lists[0][0].dtype == torch.bfloat16), None

    monkeypatch.setattr(clip_grads, "l2_norm_impl", kernel)
    late, copied = pairs()
    given = for_norm(gradients(late))
    assert {tensor.dtype for tensor in given} == {torch.bfloat16 if same_in_bf16 else torch.float32}
    assert not any(isinstance(tensor, LateGradient) for tensor in given)
    assert all(map(torch.equal, (tensor.float() for tensor in given), gradients(copied)))
    # Kernels take the dtype of a list's first tensor for all of them.
    mixed = for_norm([*gradients(copied), *gradients(late)])
    assert {tensor.dtype for tensor in mixed} == {torch.float32}


def test_a_kernel_that_takes_fp32_alone_gets_that(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import clip_grads

    def kernel(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], _per_tensor: bool) -> Any:
        if lists[0][0].dtype != torch.float32:
            raise RuntimeError("not implemented for bfloat16")
        return torch.ones(1), None

    monkeypatch.setattr(clip_grads, "l2_norm_impl", kernel)
    late, copied = pairs()
    assert all(map(torch.equal, for_norm(gradients(late)), gradients(copied)))


def test_a_kernel_gets_tensors_aligned_as_their_copies_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import clip_grads

    monkeypatch.setattr(clip_grads, "l2_norm_impl", lambda *_: (torch.ones(1), None))
    buffer = torch.randn(65).bfloat16()
    shifted = LateGradient.of(buffer[1:], torch.zeros(64))
    (given,) = for_norm([shifted])
    assert torch.equal(given, buffer[1:])
    assert given.data_ptr() % 8 == 0


def test_without_late_gradients_nothing_changes(taken: None) -> None:
    _, copied = pairs()
    listed = gradients(copied)
    assert for_norm(listed) is listed
