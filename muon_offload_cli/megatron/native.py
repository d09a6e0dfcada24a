"""Megatron's own chunked offloader with its host buffers mapped from files.

Megatrons with a `ChunkedOptimizerStateOffloader` (megatron/core/optimizer/cpu_offloading) move momentum and
masters between the device and pinned host memory themselves, which they allocate in one method. The subclass
made here overrides that allocator. The life cycle of a step and of a checkpoint stays Megatron's: added are
only what is said after a step, and the flush before a checkpoint is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron.arguments import local_rank
from muon_offload_cli.offload.mapped_buffers import MappedBuffers
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.units import format_bytes


def make_mapped_offloader(
    native: type[Any], settings: OffloadSettings, on_built: Callable[[Any], None]
) -> type[Any]:
    """Make the class that stands for Megatron's offloader.

    Args:
        native: Megatron's own, or one with its contract (`native_contract`).
        settings: The directory is read here; chunk size and fraction reach `native` through its config.
        on_built: Called with each instance.

    Returns:
        A subclass of `native`.
    """
    if not settings.directories:
        raise wrong(
            "mapped buffers need a directory", "offload.directory=/absolute/folder", "offload.directory"
        )
    # Its buffers are files of their own, so a rank has one directory where others of ours would be striped.
    directory = settings.directories[local_rank() % len(settings.directories)]

    class MappedOptimizerStateOffloader(native):  # type: ignore[misc]
        """Megatron's chunked offloader whose host tensors are the pages of files.

        Attributes:
            buffers: The tensors that it made and that still exist.
            sweeps: Steps taken.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.buffers = MappedBuffers(directory, owner=f"rank {os.environ.get('RANK', '0')}")
            self.sweeps = 0
            super().__init__(*args, **kwargs)
            on_built(self)

        def _new_cpu_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
            """Allocate host memory like `tensor`.

            At each checkpoint the base class moves every tensor that is not pinned into a new buffer; one
            that lies in a buffer already is returned as it is, and copied onto itself, which does nothing.
            """
            return tensor if self.buffers.holds(tensor) else self.buffers.new_like(tensor)

        def step(self, *args: Any, **kwargs: Any) -> Any:
            """Take a step, and say how much state lies in files."""
            result = super().step(*args, **kwargs)
            self.sweeps += 1
            self._say(f"step {self.sweeps}: {format_bytes(self.buffers.nbytes)} in files of {directory}")
            return result

        def synchronize_for_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            """Make the state stable for a checkpoint, and write its pages back before the writer starts."""
            result = super().synchronize_for_checkpoint(*args, **kwargs)
            self._say(f"flushed {format_bytes(self.buffers.flush())} to {directory} before a checkpoint")
            return result

        def _say(self, text: str) -> None:
            print(f"optimizer state of {type(self.optimizer).__name__}, {text}", flush=True)

    return MappedOptimizerStateOffloader
