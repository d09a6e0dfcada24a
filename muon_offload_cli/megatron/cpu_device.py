"""The CPU rehearsal device: unmodified Megatron trains on CPUs while `cpu_device` is entered.

Megatron asks for CUDA by name in hundreds of places. Each substitution below stands in for one kind of
request and says who makes it. Megatron's files stay untouched; everything is undone on exit. Collectives
run over gloo. Meant for laptops, login nodes and CI: the numerics are those of bf16 on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from muon_offload_cli.megatron.cpu_host import tell_host_from_device
from muon_offload_cli.megatron.substitute import Substitutions

CPU = torch.device("cpu")
TYPE_NAMES = {
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.float32: "torch.cuda.FloatTensor",
}


class _CudaMeansCpu(TorchFunctionMode):
    """Turns every request for a CUDA device into one for the CPU: literals, ints, ``.cuda()``, ``.to()``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The mixed-precision optimizer, gradient clipping and DistributedOptimizer compare this text.
            return TYPE_NAMES.get(args[0].dtype, func(*args))
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], CPU, *args[2:])
        if func is torch.device and args and args[0] == "cuda":
            return CPU
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = CPU
        return func(*map(_cpu, args), **{key: _cpu(value) for key, value in kwargs.items()})


def _cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return CPU
    return value


class _Stream:
    """A stream on a device that runs everything at once, in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.device = CPU

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all earlier work has ended."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: all earlier work has ended."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event or _Event()

    def synchronize(self) -> None:
        """Do nothing: all earlier work has ended."""

    def query(self) -> bool:
        """Return True: all earlier work has ended."""
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Event:
    """An event of such a stream: it has happened as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return 0 ms: nothing is timed on such a stream."""
        return 0.0


def _returning(value: Any) -> Callable[..., Any]:
    """Return a new function that takes anything and returns `value`.

    A new one each time: torch's compiler keeps rules by function object and refuses one that stands for
    two of its own.
    """

    def function(*_: Any, **__: Any) -> Any:
        return value

    return function


@contextlib.contextmanager
def cpu_device() -> Iterator[None]:
    """Let Megatron train on CPUs until the context is left.

    Enter it once, before Megatron builds anything; the process must not use CUDA inside. One stream object
    stands for all streams, work runs at once.
    """
    mode = _CudaMeansCpu()
    with Substitutions() as stack:
        _replace_runtime(stack)
        _replace_random(stack)
        _replace_autograd(stack, mode)
        _replace_collectives(stack)
        _replace_megatron(stack)
        stack.enter_context(mode)
        yield


def _replace_runtime(stack: Substitutions) -> None:
    cuda = torch.cuda
    stream = _Stream()
    properties = SimpleNamespace(
        name="cpu", major=8, minor=0, multi_processor_count=1, total_memory=0, gcnArchName=""
    )
    # Start of the training loop: process groups are only built where a device is counted.
    stack.replace(cuda, "is_available", lambda: True)
    stack.replace(cuda, "is_initialized", lambda: True)
    stack.replace(cuda, "device_count", lambda: 1)
    stack.replace(cuda, "init", _returning(None))
    stack.replace(cuda, "_lazy_init", _returning(None))
    # Allocations name the current device; argument checks ask for its capability.
    stack.replace(cuda, "current_device", lambda: CPU)
    stack.replace(cuda, "set_device", _returning(None))
    stack.replace(cuda, "get_device_capability", lambda *_: (8, 0))
    stack.replace(cuda, "get_device_properties", lambda *_: properties)
    stack.replace(cuda, "get_device_name", lambda *_: "cpu")
    stack.replace(cuda, "device", lambda *_: contextlib.nullcontext())
    # Gradient buffers, the MoE dispatcher and timers order work with streams and events.
    stack.replace(cuda, "Stream", _Stream)
    stack.replace(cuda, "Event", _Event)
    stack.replace(cuda, "current_stream", lambda *_: stream)
    stack.replace(cuda, "default_stream", lambda *_: stream)
    stack.replace(cuda, "set_stream", _returning(None))
    stack.replace(cuda, "stream", lambda *_: contextlib.nullcontext())
    stack.replace(cuda, "synchronize", _returning(None))
    stack.replace(cuda, "empty_cache", _returning(None))
    # Reports of memory: there is none of the device's own.
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        stack.replace(cuda, name, _returning(0))
    stack.replace(cuda, "mem_get_info", lambda *_: (0, 0))
    stack.replace(cuda, "memory_stats", lambda *_: {})
    stack.replace(cuda, "reset_peak_memory_stats", _returning(None))
    stack.replace(cuda.nvtx, "range_push", _returning(None))
    stack.replace(cuda.nvtx, "range_pop", _returning(None))
    stack.replace(torch.Tensor, "record_stream", _returning(None))
    # torch's optimizers ask the accelerator whether a graph is being captured; the name differs by version.
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):
            stack.replace(torch.optim.Optimizer, name, _returning(None))
    # Pinning needs a driver; a data loader's batches are used where they are.
    stack.replace(torch.Tensor, "pin_memory", lambda self, *_: self)


def _replace_random(stack: Substitutions) -> None:
    """The RNG tracker forks CUDA's generator; lazy calls must run at once or TP replicas drift apart."""
    from megatron.core.tensor_parallel import random

    def set_state(state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    for owner in (torch.cuda, torch.cuda.random):
        stack.replace(owner, "get_rng_state", lambda *_, **__: torch.get_rng_state())
        stack.replace(owner, "set_rng_state", set_state)
        stack.replace(owner, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed))
        stack.replace(owner, "manual_seed_all", lambda seed: torch.default_generator.manual_seed(seed))
    stack.replace(torch.cuda, "default_generators", (torch.default_generator,))
    for owner in (torch.cuda, random):
        stack.replace(owner, "_lazy_call", lambda call, **_: call())
    stack.replace(random, "_lazy_init", lambda: None)
    stack.replace(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    stack.replace(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))


def _replace_autograd(stack: Substitutions, mode: TorchFunctionMode) -> None:
    """torch takes a function mode off while the engine runs; custom backward functions need it there."""
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    stack.replace(torch.autograd, "_engine_run_backward", run_backward_in_mode)


def _replace_collectives(stack: Substitutions) -> None:
    """gloo's all_gather needs equal sizes; layer-wise's older path gathers what each rank owns."""
    all_gather = torch.distributed.all_gather

    def all_gather_uneven(
        outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({output.numel() for output in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        largest = max(output.numel() for output in outputs)
        padded = tensor.new_zeros(largest)
        padded[: tensor.numel()] = tensor.reshape(-1)
        gathered = [tensor.new_empty(largest) for _ in outputs]
        all_gather(gathered, padded, group=group)
        for output, full in zip(outputs, gathered, strict=True):
            output.view(-1).copy_(full[: output.numel()])
        return None

    stack.replace(torch.distributed, "all_gather", all_gather_uneven)


def _replace_megatron(stack: Substitutions) -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # The original converts only tensors whose is_cuda is set; split sizes must be numpy.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            stack.replace(module, "maybe_move_tensor_to_cpu", to_host)
    # Development branches have an offloader of their own.
    tell_host_from_device(stack)
