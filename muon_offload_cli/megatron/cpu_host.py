"""Telling host memory from device memory on a CPU rank, for Megatron's own chunked offloader.

It decides by ``is_cuda`` what has to move and by ``is_pinned`` what has moved. On a CPU rank no tensor is
CUDA's: nothing would ever move, and after a checkpoint old momentum would be taken for new. Inside its
methods, host memory is what was allocated there as such, pinned or mapped from a file; all else is the
device's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.overrides import TorchFunctionMode

from muon_offload_cli.megatron import native_contract
from muon_offload_cli.megatron.substitute import Substitutions

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _HostIsNotDevice(TorchFunctionMode):
    """Answers ``is_cuda`` and ``is_pinned`` by where a tensor was allocated while this mode was entered."""

    def __init__(self) -> None:
        super().__init__()
        # Storages, because ``.data`` shows the same bytes as another tensor object each time.
        self._pinned: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._mapped: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_CUDA:  # a new object at each access
            address = _address(args[0])
            return address not in self._pinned and address not in self._mapped
        if func is torch.Tensor.is_pinned:
            return _address(args[0]) in self._pinned
        pinned = kwargs.pop("pin_memory", False)  # Pinning needs a driver.
        made = func(*args, **kwargs)
        if pinned:
            self._pinned[_address(made)] = made.untyped_storage()
        elif func is torch.from_file:
            self._mapped[_address(made)] = made.untyped_storage()
        return made


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tell_host_from_device(stack: Substitutions) -> None:
    """Let the native offloader tell the two apart until `stack` is closed; nothing where there is none."""
    found = native_contract.modules()
    native = getattr(found[0], native_contract.CLASS, None) if found is not None else None
    if native is None:
        return
    mode = _HostIsNotDevice()

    def entered(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return method(*args, **kwargs)

        return wrapped

    for name, method in list(vars(native).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            stack.replace(native, name, entered(method))
