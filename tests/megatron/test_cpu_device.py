"""The CPU rehearsal device: CUDA requests are answered by the CPU while it is entered, and never after."""

from __future__ import annotations

import pytest
import torch

from muon_offload_cli.megatron.cpu_device import cpu_device
from muon_offload_cli.megatron.substitute import Substitutions


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.zeros(2, device="cuda:1"),
        lambda: torch.zeros(2, device=torch.device("cuda", 0)),
        lambda: torch.empty(2, device=0),
        lambda: torch.zeros(2).cuda(),
        lambda: torch.zeros(2).to("cuda"),
        lambda: torch.zeros(2).to(0),
        lambda: torch.zeros(2).to(device="cuda", dtype=torch.float64),
        lambda: torch.tensor([1.0], device=torch.cuda.current_device()),
        lambda: torch.nn.Linear(2, 2, device="cuda").weight,
    ],
)
def test_every_way_to_ask_for_cuda_gives_the_cpu(make) -> None:  # type: ignore[no-untyped-def]
    with cpu_device():
        assert make().device.type == "cpu"


def test_types_are_called_as_on_a_gpu() -> None:
    with cpu_device():
        assert torch.zeros(1, dtype=torch.bfloat16, device="cuda").type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.float64).dtype is torch.float64
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_custom_backward_functions_see_the_cpu_too() -> None:
    class Doubling(torch.autograd.Function):
        """Asks for CUDA memory in its backward, as Megatron's do."""

        @staticmethod
        def forward(ctx, value):  # type: ignore[no-untyped-def]
            return value * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            out = torch.empty(grad.shape, device="cuda")
            out.copy_(grad * 2)
            return out

    with cpu_device():
        value = torch.ones(3, requires_grad=True)
        Doubling.apply(value).sum().backward()  # type: ignore[no-untyped-call]
        assert value.grad is not None
        assert value.grad.tolist() == [2, 2, 2]


def test_streams_and_events_have_always_happened() -> None:
    with cpu_device():
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            event.record()
        assert event.query()
        assert stream.query()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == 0


def test_random_numbers_of_the_device_are_the_cpus() -> None:
    with cpu_device():
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), first)


def test_everything_is_undone_on_exit_also_after_an_exception() -> None:
    names = ("is_available", "current_device", "Stream", "synchronize", "manual_seed", "device_count")
    before = [getattr(torch.cuda, name) for name in names]
    backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with pytest.raises(KeyError), cpu_device():
        raise KeyError
    assert [getattr(torch.cuda, name) for name in names] == before
    assert torch.autograd._engine_run_backward is backward  # type: ignore[attr-defined]
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_substitutions_remove_what_was_not_there_and_restore_what_was() -> None:
    class Owner:
        present = 1

    class Child(Owner):
        """Inherits an attribute that must not become its own."""

    with Substitutions() as stack:
        stack.replace(Owner, "absent", 2)
        stack.replace(Owner, "present", 3)
        stack.replace(Owner, "present", 4)
        stack.replace(Child, "present", 5)
        assert (Owner.absent, Owner.present, Child.present) == (2, 4, 5)  # type: ignore[attr-defined]
    assert (Owner.present, Child.present) == (1, 1)
    assert not hasattr(Owner, "absent")
    assert "present" not in vars(Child)
