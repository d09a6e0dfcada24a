"""Megatron's own chunked offloader with its host buffers mapped from files.

Megatrons with a `ChunkedOptimizerStateOffloader` (megatron/core/optimizer/cpu_offloading) move momentum and
masters between the device and pinned host memory themselves, which they allocate in one method. The subclass
made here overrides that allocator. The life cycle of a step and of a checkpoint stays Megatron's: added are
only what is said after a step, and the flush before a checkpoint is written.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch

from muon_offload_cli.errors import does_not_fit, wrong
from muon_offload_cli.machine.numa import NearDevice
from muon_offload_cli.megatron import native_contract
from muon_offload_cli.megatron.arguments import local_rank
from muon_offload_cli.megatron.state_census import PLAIN_MUON_BYTES
from muon_offload_cli.offload.mapped_buffers import MappedBuffers
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.offload.watched import Watched
from muon_offload_cli.storage.store import Store
from muon_offload_cli.units import MIB, format_bytes


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


class NativeInstallation:
    """The hold on Megatron's own offloader in this process.

    Until it is closed, Megatron builds the mapped class wherever it would build its own, and its optimizer
    configs ask for it.

    Raises:
        UserError: This Megatron's offloader differs from what is relied upon; nothing was replaced.
    """

    def __init__(self, settings: OffloadSettings, on_built: Callable[[Any], None] | None = None) -> None:
        from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
        from megatron.core.optimizer.optimizer_config import OptimizerConfig

        found = native_contract.modules()
        if found is None:
            raise wrong("this Megatron has no offloader of its own", "offload.engine=disk", "offload.engine")
        missing = native_contract.missing_parts(*found, OptimizerConfig)
        if missing:
            raise changed_contract(missing)
        self.settings = settings
        self.on_built = on_built
        # Weak: an optimizer that the program drops gives back its files.
        self._offloaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._modules = found
        self._native = getattr(found[0], native_contract.CLASS)

        def built(offloader: Any) -> None:
            self._offloaders.add(offloader)
            if on_built is not None and isinstance(offloader.optimizer, TensorParallelMuon):
                watched: Watched = MuonView(offloader, settings)
                on_built(SimpleNamespace(offloader=watched))

        self._class = make_mapped_offloader(self._native, settings, built)
        self._class.installation = self
        # Megatron's optimizer module imported the name by value.
        for module in found:
            setattr(module, native_contract.CLASS, self._class)
        self._config = OptimizerConfig
        self._post_init = OptimizerConfig.__post_init__
        OptimizerConfig.__post_init__ = asking_for_offload(self._post_init, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def leave_configs_alone(self) -> None:
        """Let optimizer configs say by themselves whether they ask for offload."""
        self._config.__post_init__ = self._post_init

    def close(self) -> None:
        """Give Megatron its class back; buffers in use live as long as their tensors."""
        if getattr(self._modules[0], native_contract.CLASS) is self._class:
            for module in self._modules:
                setattr(module, native_contract.CLASS, self._native)
            self.leave_configs_alone()
        for offloader in self._offloaders:
            offloader.buffers.close()


def asking_for_offload(post_init: Callable[[Any], None], settings: OffloadSettings) -> Callable[[Any], None]:
    """Wrap ``OptimizerConfig.__post_init__``: a config that asks for no offload is given our settings.

    A program of the user's own builds its config as it always did; one that sets these fields by itself, by
    flag or by hand, keeps them, and so does a config of another optimizer than Muon.
    """

    @functools.wraps(post_init)
    def wrapped(config: Any) -> None:
        if config.optimizer == "muon" and not config.chunked_optimizer_state_offload:
            config.chunked_optimizer_state_offload = True
            config.optimizer_state_offload_chunk_size_mb = math.ceil(settings.chunk_bytes / MIB)
            config.optimizer_state_offload_fraction = settings.fraction
        post_init(config)

    return wrapped


def changed_contract(missing: list[str]) -> Exception:
    """Return the error for a Megatron whose offloader is another than the one that is known."""
    return does_not_fit(
        "offload.engine=mapped extends this Megatron's own chunked offloader, which has changed: it lacks "
        f"{'; '.join(missing)}.",
        "offload.engine=disk",
        "offload.engine",
        "megatron.path",
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    state_bytes: int


class MuonView:
    """What the observer and checkpoints ask of an offloader, answered for Megatron's own.

    The kernel reads and writes the files as their pages are touched, so no transfer is counted or waited for.
    """

    bytes_read = bytes_written = staging_high_bytes = pinned_bytes = window_bytes = 0
    wait_s = io_busy_s = 0.0
    near = NearDevice()

    def __init__(self, native: Any, settings: OffloadSettings) -> None:
        self._native = native
        self.settings = settings
        self.stores: Mapping[Tier, Store] = {}
        self.plan = SimpleNamespace(
            chunks=[
                _Chunk(sum(parameter.numel() for parameter in chunk.params) * PLAIN_MUON_BYTES)
                for chunk in native.chunks
            ]
        )

    @property
    def sweeps(self) -> int:
        """Steps taken."""
        return int(self._native.sweeps)

    def stored_bytes(self, tier: Tier) -> int:
        """Return the bytes in files; what is not selected is counted by who compares with the plan."""
        return self._native.buffers.nbytes if tier is Tier.DISK else 0

    def drop_cache(self) -> None:
        """Do nothing: pages are the kernel's to keep."""

    def synchronize(self) -> None:
        """Let masters and momenta rest where they lie between steps, and wait for the copies."""
        self._native.offload_for_forward()
        torch.cuda.synchronize()
