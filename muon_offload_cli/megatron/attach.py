"""Attaching the offloader to Megatron, before the optimizer is built."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.megatron.muon_child import make_muon_child
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.storage.store import StoreError
from muon_offload_cli.units import GIB, MIB

MUON_CLASSES = ("TensorParallelMuon", "TensorParallelAdaptiveMuon")
"""What is taken over of megatron/core/optimizer/emerging_optimizers.py; not all releases have both."""

ENGINES = ("disk", "mapped", "host")


class Installation:
    """The offloader's hold on Megatron in this process.

    Attributes:
        optimizers: Every Muon optimizer that was built with its state offloaded, in order.
    """

    def __init__(self, settings: OffloadSettings, on_built: Callable[[Any], None] | None = None) -> None:
        from megatron.core.optimizer import emerging_optimizers, layer_wise_optimizer
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

        self.optimizers: list[Any] = []
        self._module = layer_wise_optimizer
        self._base = Float16OptimizerWithFloat16Params
        self._on_built = on_built
        # layer_wise_optimizer imported the name by value, so it is rebound there and nowhere else: other
        # builders (plain muon, adam) keep the class they know.
        muon = tuple(filter(None, (getattr(emerging_optimizers, name, None) for name in MUON_CLASSES)))
        self._class = make_muon_child(self._base, muon, settings, self._built)
        layer_wise_optimizer.Float16OptimizerWithFloat16Params = self._class

    def _built(self, optimizer: Any) -> None:
        self.optimizers.append(optimizer)
        if self._on_built is not None:
            self._on_built(optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; a store that fails once more must not hide the error that ended the run."""
        with suppress(StoreError) if error is not None else nullcontext():
            self.close()

    def close(self) -> None:
        """Give Megatron its class back and release every offloader's threads, memory and files."""
        if self._module.Float16OptimizerWithFloat16Params is self._class:
            self._module.Float16OptimizerWithFloat16Params = self._base
        with ExitStack() as closing:
            for optimizer in self.optimizers:
                closing.callback(optimizer.offloader.close)


def install(settings: OffloadSettings, on_built: Callable[[Any], None] | None = None) -> Installation:
    """Let every Muon optimizer that Megatron's layer-wise optimizer builds from now on offload its state.

    Args:
        settings: Engine, budgets, directory.
        on_built: Called with each optimizer as it is built.

    Returns:
        The installation; a second call replaces the settings for optimizers built later.
    """
    return Installation(settings, on_built)


def make_settings(
    *,
    directory: str | Path | None,
    engine: str,
    chunk_mb: float,
    fraction: float,
    host_memory_gb: float,
    ranks_per_node: int | None,
    windows: int,
) -> OffloadSettings:
    """Check arguments in the user's units and turn them into one rank's settings in bytes.

    Raises:
        UserError: All problems at once.
    """
    problems: list[Problem] = []

    def expect(holds: bool, name: str, value: object, wanted: str) -> None:
        if not holds:
            problems.append(Problem(what=f"install({name}={value!r}): want {wanted}.", keys=(name,)))

    expect(engine in ENGINES, "engine", engine, " or ".join(ENGINES))
    if engine != "host":
        absolute = directory is not None and Path(directory).is_absolute()
        expect(absolute, "directory", directory, "an absolute folder on a node-local drive")
    expect(_in_range(chunk_mb, 0, math.inf), "chunk_mb", chunk_mb, "0 or more MiB")
    expect(_in_range(fraction, 0, 1), "fraction", fraction, "a number from 0 to 1")
    expect(_in_range(host_memory_gb, 0, math.inf), "host_memory_gb", host_memory_gb, "0 or more GiB")
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    sharing = int(local_ranks) if ranks_per_node is None and local_ranks.isdecimal() else ranks_per_node
    expect(sharing is not None and sharing >= 1, "ranks_per_node", ranks_per_node, "1 or more")
    expect(isinstance(windows, int) and windows >= 1, "windows", windows, "1 or more")
    if problems or sharing is None:
        raise UserError(problems=problems)
    return OffloadSettings(
        engine=engine,
        directory=None if directory is None else Path(directory),
        # Rounded up: 0 bytes would mean one chunk of everything.
        chunk_bytes=math.ceil(chunk_mb * MIB),
        fraction=fraction,
        host_bytes=round(host_memory_gb * GIB) // sharing,
        windows=windows,
    )


def _in_range(value: object, low: float, high: float) -> bool:
    """Whether `value` is a finite number from `low` to `high`."""
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high
