"""Attaching the offloader to Megatron, before the optimizer is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from muon_offload_cli.megatron.muon_child import make_muon_child
from muon_offload_cli.offload.settings import OffloadSettings


class Installation:
    """The offloader's hold on Megatron in this process.

    Attributes:
        optimizers: Every Muon optimizer that was built with its state offloaded, in order.
    """

    def __init__(self, settings: OffloadSettings, on_built: Callable[[Any], None] | None = None) -> None:
        from megatron.core.optimizer import layer_wise_optimizer
        from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

        self.optimizers: list[Any] = []
        self._module = layer_wise_optimizer
        self._base = Float16OptimizerWithFloat16Params
        self._on_built = on_built
        # layer_wise_optimizer imported the name by value, so it is rebound there and nowhere else: other
        # builders (plain muon, adam) keep the class they know.
        layer_wise_optimizer.Float16OptimizerWithFloat16Params = make_muon_child(
            self._base, TensorParallelMuon, settings, self._built
        )

    def _built(self, optimizer: Any) -> None:
        self.optimizers.append(optimizer)
        if self._on_built is not None:
            self._on_built(optimizer)

    def close(self) -> None:
        """Give Megatron its class back and release every offloader's threads, memory and files."""
        self._module.Float16OptimizerWithFloat16Params = self._base
        for optimizer in self.optimizers:
            optimizer.offloader.close()


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
    host_bytes: int = 0,
    **more: Any,
) -> OffloadSettings:
    """Turn config units into settings; `more` are further fields of `OffloadSettings` in bytes or counts."""
    return OffloadSettings(
        engine=engine,
        directory=None if directory is None else Path(directory),
        chunk_bytes=round(chunk_mb * 2**20),
        fraction=fraction,
        host_bytes=host_bytes,
        **more,
    )
