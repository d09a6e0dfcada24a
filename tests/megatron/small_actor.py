"""A program of a user's own in this process: one CPU rank, small models, Muon from Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from muon_offload_cli.megatron.cpu_device import cpu_device

SIZE = 32
STATE_BYTES = 2 * 4 * 3 * SIZE * SIZE
"""Masters and momenta of one actor."""


@contextmanager
def one_rank() -> Iterator[None]:
    """Set up Megatron's process groups without a launcher's variables."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with cpu_device():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(7)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


@dataclass
class Actor:
    """A model with its optimizer."""

    model: Any
    optimizer: Any

    def step(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        given = torch.arange(4 * SIZE, dtype=torch.float32).view(4, SIZE).sin().to(torch.bfloat16)
        self.model(given).float().square().mean().backward()
        self.model.finish_grad_sync()
        assert self.optimizer.step()[0]

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def build(seed: int = 0) -> Actor:
    """Build three square matrices and the optimizer that Megatron makes for them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Net(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = hidden + torch.tanh(layer(hidden))
            return hidden

    torch.manual_seed(seed)
    config = TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=1, bf16=True)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Net(config).to(torch.bfloat16)
    )
    settings = OptimizerConfig(
        optimizer="muon", use_layer_wise_distributed_optimizer=True, bf16=True, lr=0.01, clip_grad=1.0
    )
    return Actor(model=model, optimizer=get_megatron_optimizer(settings, [model]))


def files_held(directory: Path) -> list[str]:
    """Return what this process holds of files in `directory`: descriptors and mappings."""
    held = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            held.append(str(entry.readlink()))
        except FileNotFoundError:  # the listing's own
            continue
    held += Path("/proc/self/maps").read_text().splitlines()
    return [line for line in held if str(directory) in line]
