"""Gradients in bf16 stay so until their chunk is stepped, and nobody sees a difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from muon_offload_cli.megatron import late_gradients
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


def test_any_reader_gets_the_copy_and_a_writer_an_error() -> None:
    (late, *_), (copied, *_) = pairs()
    gradient: Any = late.grad
    assert (gradient.dtype, gradient.shape, gradient.numel()) == (torch.float32, (16, 8), 128)
    assert torch.equal(gradient.abs().sum(), copied.grad.abs().sum())  # type: ignore[union-attr]
    assert torch.equal(gradient.detach() * 2, copied.grad * 2)  # type: ignore[operator]
    for change in (lambda: gradient.mul_(2), lambda: gradient.detach().copy_(gradient)):
        with pytest.raises(RuntimeError, match="before its chunk is stepped"):
            change()
    with pytest.raises(RuntimeError, match="before its chunk is stepped"):
        gradient[0] = 0


@pytest.mark.parametrize("same_in_bf16", [True, False])
def test_a_kernel_over_the_list_gets_bf16_only_where_its_norm_is_the_same(
    monkeypatch: pytest.MonkeyPatch, same_in_bf16: bool
) -> None:
    from megatron.core.optimizer import clip_grads

    def kernel(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], _per_tensor: bool) -> Any:
        total = sum((tensor.float() ** 2).sum() for tensor in lists[0])
        return total + (not same_in_bf16 and lists[0][0].dtype == torch.bfloat16), None

    monkeypatch.setattr(clip_grads, "l2_norm_impl", kernel)
    late_gradients._norm_is_the_same_in_bf16.cache_clear()
    late, copied = pairs()
    given = for_norm(gradients(late))
    assert {tensor.dtype for tensor in given} == {torch.bfloat16 if same_in_bf16 else torch.float32}
    assert not any(isinstance(tensor, LateGradient) for tensor in given)
    assert all(map(torch.equal, (tensor.float() for tensor in given), gradients(copied)))
    # Kernels take the dtype of a list's first tensor for all of them.
    mixed = for_norm([*gradients(copied), *gradients(late)])
    assert {tensor.dtype for tensor in mixed} == {torch.float32}
    late_gradients._norm_is_the_same_in_bf16.cache_clear()


def test_a_kernel_gets_tensors_aligned_as_their_copies_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import clip_grads

    monkeypatch.setattr(clip_grads, "l2_norm_impl", lambda *_: (torch.ones(1), None))
    buffer = torch.randn(65).bfloat16()
    shifted = LateGradient.of(buffer[1:], torch.zeros(64))
    (given,) = for_norm([shifted])
    assert torch.equal(given, buffer[1:])
    assert given.data_ptr() % 8 == 0
    late_gradients._norm_is_the_same_in_bf16.cache_clear()


def test_without_late_gradients_nothing_changes(taken: None) -> None:
    _, copied = pairs()
    listed = gradients(copied)
    assert for_norm(listed) is listed
