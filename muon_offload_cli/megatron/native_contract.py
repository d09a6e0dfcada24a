"""What a Megatron's own chunked offloader must look like for its buffers to be mapped from files.

Nothing goes by version: development branches and forks call themselves by the last release's.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

CLASS = "ChunkedOptimizerStateOffloader"
ALLOCATOR = "_new_cpu_buffer"
CONFIG_FIELDS = (
    "chunked_optimizer_state_offload",
    "optimizer_state_offload_chunk_size_mb",
    "optimizer_state_offload_fraction",
)
# Parameters that are passed, by method; what the method takes beyond them must have defaults.
_CALLS: Mapping[str, tuple[str, ...]] = {
    ALLOCATOR: ("tensor",),
    "step": (),
    "synchronize_for_checkpoint": (),
    "offload_for_forward": (),
}
_ALLOCATING = ("_cpu_buffer_for_state", "_cpu_buffer_for_master", "adopt_cpu_optimizer_state")
_FIGURES = ("chunks", "selected_params")


def modules() -> tuple[ModuleType, ModuleType] | None:
    """Return the module that defines the native offloader and the one that builds it; None without either."""
    try:
        from megatron.core.optimizer import optimizer
        from megatron.core.optimizer.cpu_offloading import chunked_optimizer_state_offload as defining
    except ImportError:
        return None
    # A renamed class is a changed contract, not a Megatron without an offloader.
    return defining, optimizer


def missing_parts(defining: ModuleType, building: ModuleType, config: type[Any]) -> list[str]:
    """Return what the native offloader lacks of what is relied upon, as phrases; empty if nothing.

    Args:
        defining: Module that defines it.
        building: Module that builds it, having imported it by name.
        config: Megatron's `OptimizerConfig`.
    """
    missing: list[str] = []
    native = getattr(defining, CLASS, None)
    if not inspect.isclass(native):
        return [f"{defining.__name__}.{CLASS}"]
    if getattr(building, CLASS, None) is not native:
        missing.append(f"{building.__name__}.{CLASS}")
    for name, wanted in _CALLS.items():
        method = inspect.getattr_static(native, name, None)
        function = inspect.unwrap(getattr(method, "__func__", method)) if method is not None else None
        if not inspect.isfunction(function):
            missing.append(f"{CLASS}.{name}({', '.join(wanted)})")
            continue
        given = wanted if isinstance(method, staticmethod) else ("self", *wanted)
        try:
            inspect.signature(function).bind(*given)
        except TypeError:
            shown = f"{CLASS}.{name}{inspect.signature(function)}"
            missing.append(f"{CLASS}.{name}({', '.join(wanted)}): it is {shown}")
    missing += [f"{CLASS}.{name}" for name in _FIGURES if not hasattr(native, name)]
    for name in _ALLOCATING:
        method = getattr(native, name, None)
        function = inspect.unwrap(method) if callable(method) else None
        if not inspect.isfunction(function) or ALLOCATOR not in function.__code__.co_names:
            missing.append(f"{CLASS}.{name} allocating through {ALLOCATOR}")
    fields = {field.name for field in dataclasses.fields(config)}
    missing += [f"{config.__name__}.{name}" for name in CONFIG_FIELDS if name not in fields]
    return missing
