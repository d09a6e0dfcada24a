"""A small stand-in for the chunked offloader of Megatron's development branch: its contract, no device."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

DEFINING = "megatron.core.optimizer.cpu_offloading.chunked_optimizer_state_offload"


@dataclasses.dataclass(frozen=True)
class Chunk:
    params: tuple[torch.Tensor, ...]


class ChunkedOptimizerStateOffloader:
    """Moves state to host buffers and back by copying; buffers come from one static method."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        master_params: Sequence[torch.Tensor],
        chunk_size_bytes: int,
        offload_fraction: float,
        state_dtypes: Sequence[torch.dtype],
    ) -> None:
        self.optimizer = optimizer
        self._masters = list(master_params)
        self._cpu_state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._cpu_master: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(Chunk((parameter,)) for parameter in self._masters)

    @property
    def selected_params(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._masters)

    @staticmethod
    def _new_cpu_buffer(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _cpu_buffer_for_state(self, param: torch.Tensor, key: str, tensor: torch.Tensor) -> torch.Tensor:
        mine = self._cpu_state.setdefault(param, {})
        if key not in mine:
            mine[key] = self._new_cpu_buffer(tensor)
        return mine[key]

    def _cpu_buffer_for_master(self, param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if param not in self._cpu_master:
            self._cpu_master[param] = self._new_cpu_buffer(tensor)
        return self._cpu_master[param]

    def adopt_cpu_optimizer_state(self) -> None:
        for param in self._masters:
            for key, value in self.optimizer.state.get(param, {}).items():
                if not value.is_pinned():
                    buffer = self._new_cpu_buffer(value)
                    buffer.copy_(value)
                    self.optimizer.state[param][key] = buffer
                self._cpu_state.setdefault(param, {})[key] = self.optimizer.state[param][key]

    @torch.no_grad()
    def step(self) -> None:
        for param in self._masters:
            param.data = param.data.clone()
        self.optimizer.step()

    @torch.no_grad()
    def offload_for_forward(self, offload_master: bool = True) -> None:
        for param in self._masters:
            for key, value in self.optimizer.state.get(param, {}).items():
                buffer = self._cpu_buffer_for_state(param, key, value)
                self.optimizer.state[param][key] = buffer.copy_(value)
            if offload_master:
                param.data = self._cpu_buffer_for_master(param, param.data).copy_(param.data)

    def synchronize_for_checkpoint(self) -> None:
        self.offload_for_forward()
        self.adopt_cpu_optimizer_state()


@dataclasses.dataclass
class OptimizerConfig:
    optimizer: str = "adam"
    chunked_optimizer_state_offload: bool = False
    optimizer_state_offload_chunk_size_mb: int = 0
    optimizer_state_offload_fraction: float = 1.0

    def __post_init__(self) -> None:
        pass


def stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Any]:
    """Put the stand-in where a development branch has its offloader; returns its module and the builder's."""
    from megatron.core.optimizer import optimizer, optimizer_config

    defining = ModuleType(DEFINING)
    native = type(ChunkedOptimizerStateOffloader.__name__, (ChunkedOptimizerStateOffloader,), {})
    defining.ChunkedOptimizerStateOffloader = native  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, DEFINING, defining)
    monkeypatch.setattr(optimizer, "ChunkedOptimizerStateOffloader", native, raising=False)
    config = dataclasses.dataclass(type("OptimizerConfig", (OptimizerConfig,), {}))
    monkeypatch.setattr(optimizer_config, "OptimizerConfig", config)
    return defining, optimizer
