"""Any rank of any world in one process: Megatron's parser, groups and modules without devices or peers.

The flags are the ones of the real run. Megatron's own ``--fake-process-group`` answers every collective at
once, and parameters are born on the meta device, so that a rank of a model of any size costs only Python
objects.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from muon_offload_cli.config.schema import Config
from muon_offload_cli.megatron.cpu_device import cpu_device
from muon_offload_cli.megatron.flags import megatron_flags
from muon_offload_cli.megatron.model import embedding_ranks
from muon_offload_cli.megatron.plain_torch import plain_torch
from muon_offload_cli.megatron.release import parser_flags
from muon_offload_cli.megatron.substitute import Substitutions

META = torch.device("meta")


class FakedWorld:
    """Megatron, told that it is rank `n` of a world that does not exist.

    Attributes:
        args: What Megatron's parser and validation made of the config's flags.
    """

    def __init__(self, world_size: int) -> None:
        from megatron.training.arguments import parse_and_validate_args

        self.world_size = world_size
        self.args: Any = parse_and_validate_args()

    @contextlib.contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """Be one rank: its process groups exist until the context is left."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random as tensor_random
        from torch.testing._internal.distributed.fake_pg import FakeStore

        args = self.args
        args.rank = rank
        torch.distributed.init_process_group(
            backend="fake", store=FakeStore(), rank=rank, world_size=self.world_size
        )
        try:
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
                get_embedding_ranks=embedding_ranks,
            )
            # Modules fork the generators of this tracker where they initialize weights.
            tensor_random.model_parallel_cuda_manual_seed(args.seed)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def faked_world(config: Config) -> Iterator[FakedWorld]:
    """Parse and validate a config's flags in a world of its full size; no rank exists yet.

    One such world at a time: Megatron keeps its arguments in modules' variables, which are cleared on exit.

    Args:
        config: Resolved config; its device is not asked for.
    """
    flags = megatron_flags(
        config, device="cpu", transformer_engine=False, data_prefix=None, known=parser_flags()
    )
    extra = ["--fake-process-group", "--init-model-with-meta-device", "--no-initialization"]
    world_size = config.launcher.nodes * config.launcher.ranks_per_node
    with Substitutions() as stack:
        stack.enter_context(_environment(world_size))
        stack.enter_context(cpu_device())
        stack.enter_context(plain_torch())
        # Most parameters are made on the current device by name.
        stack.replace(torch.cuda, "current_device", lambda: META)
        stack.replace(argparse.ArgumentParser, "error", _raise)
        stack.replace(sys, "argv", [sys.argv[0], *flags, *extra])
        stack.callback(_forget_arguments)
        yield FakedWorld(world_size)


def _raise(parser: argparse.ArgumentParser, message: str) -> None:
    """Raise what the parser would print before it ends the process."""
    raise ValueError(message)


def _forget_arguments() -> None:
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    destroy_num_microbatches_calculator()
    destroy_global_vars()


@contextlib.contextmanager
def _environment(world_size: int) -> Iterator[None]:
    """Set what torchrun and the launcher set for every rank; Megatron's parser reads it."""
    values = {
        "RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
