"""Attaching the offloader to Megatron, before the optimizer is built."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from muon_offload_cli.errors import Problem, UserError, wrong
from muon_offload_cli.megatron import native_contract
from muon_offload_cli.megatron.muon_child import make_muon_child
from muon_offload_cli.megatron.native import NativeInstallation
from muon_offload_cli.offload.directories import directories_of
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.storage.store import StoreError
from muon_offload_cli.units import GIB, MIB

MUON_CLASSES = ("TensorParallelMuon", "TensorParallelAdaptiveMuon")
"""What is taken over of megatron/core/optimizer/emerging_optimizers.py; not all releases have both."""

ENGINES = ("disk", "mapped", "host")


class Installation:
    """The offloader's hold on Megatron in this process.

    It owns no optimizer: one that its program drops is closed by that, and its host memory goes to the next.

    Attributes:
        settings: For this rank; the optimizers of the process share its budget of host memory.
        on_built: Called with each optimizer.
    """

    def __init__(self, settings: OffloadSettings, on_built: Callable[[Any], None] | None = None) -> None:
        from megatron.core.optimizer import emerging_optimizers, layer_wise_optimizer
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

        self.settings = settings
        self.on_built = on_built
        self._built_so_far: list[weakref.ref[Any]] = []
        self._module = layer_wise_optimizer
        self._base = Float16OptimizerWithFloat16Params
        # layer_wise_optimizer imported the name by value, so it is rebound there and nowhere else: other
        # builders (plain muon, adam) keep the class they know.
        muon = tuple(filter(None, (getattr(emerging_optimizers, name, None) for name in MUON_CLASSES)))
        self._class = make_muon_child(self._base, muon, self._next_settings, self._built)
        self._class.installation = self
        layer_wise_optimizer.Float16OptimizerWithFloat16Params = self._class

    @property
    def optimizers(self) -> list[Any]:
        """Every Muon optimizer that was built with its state offloaded and still has it, in order."""
        built = (reference() for reference in self._built_so_far)
        return [optimizer for optimizer in built if optimizer is not None and optimizer.close.alive]

    def _next_settings(self) -> OffloadSettings:
        """Leave the next optimizer what the present ones have not taken of the host memory."""
        taken = sum(optimizer.offloader.stored_bytes(Tier.HOST) for optimizer in self.optimizers)
        return replace(self.settings, host_bytes=max(0, self.settings.host_bytes - taken))

    def _built(self, optimizer: Any) -> None:
        self._built_so_far.append(weakref.ref(optimizer))
        if self.on_built is not None:
            self.on_built(optimizer)

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
                closing.callback(optimizer.close)


def install(
    settings: OffloadSettings, on_built: Callable[[Any], None] | None = None
) -> Installation | NativeInstallation:
    """Let every Muon optimizer that Megatron's layer-wise optimizer builds from now on offload its state.

    Args:
        settings: Engine, budgets, directories.
        on_built: Called with each optimizer as it is built.

    Returns:
        The installation; the present one if it has these settings. With ``mapped`` and a Megatron that brings
        a chunked offloader, that one is extended, and no offloader of ours is built.

    Raises:
        UserError: The process has an installation with other settings, or Megatron's own offloader differs
            from what is relied upon.
    """
    native = native_contract.modules()
    present = _present(native)
    if present is None:
        kind = Installation if settings.engine != "mapped" or native is None else NativeInstallation
        return kind(settings, on_built)
    if on_built not in (None, present.on_built) or settings != present.settings:
        raise wrong(
            "install() was called a second time with other settings: "
            f"{_differences(present.settings, settings)}.",
            "call it once, or close() the first installation before",
        )
    return present


def _present(native: Any) -> Installation | NativeInstallation | None:
    """Return the installation that stands, which its class in Megatron's place names."""
    from megatron.core.optimizer import layer_wise_optimizer

    places = [layer_wise_optimizer.Float16OptimizerWithFloat16Params]
    if native is not None:
        places.append(getattr(native[0], native_contract.CLASS, None))
    return next(filter(None, (getattr(place, "installation", None) for place in places)), None)


def make_settings(
    *,
    directory: str | Path | Sequence[str | Path] | None,
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
    given = [directory] if isinstance(directory, str | Path) else list(directory or ())
    directories = [Path(each) for each in given]
    if engine != "host":
        fine = bool(directories) and all(each.is_absolute() for each in directories)
        expect(
            fine and len(set(directories)) == len(directories),
            "directory",
            directory,
            "an absolute folder on a node-local drive, or a list of such folders, each once",
        )
    expect(_in_range(chunk_mb, 0, math.inf), "chunk_mb", chunk_mb, "0 or more MiB")
    expect(_in_range(fraction, 0, 1), "fraction", fraction, "a number from 0 to 1")
    expect(_in_range(host_memory_gb, 0, math.inf), "host_memory_gb", host_memory_gb, "0 or more GiB")
    local_ranks, local_rank = os.environ.get("LOCAL_WORLD_SIZE", "1"), os.environ.get("LOCAL_RANK", "0")
    sharing = int(local_ranks) if ranks_per_node is None and local_ranks.isdecimal() else ranks_per_node
    expect(sharing is not None and sharing >= 1, "ranks_per_node", ranks_per_node, "1 or more")
    expect(isinstance(windows, int) and windows >= 1, "windows", windows, "1 or more")
    if problems or sharing is None:
        raise UserError(problems=problems)
    return OffloadSettings(
        engine=engine,
        directories=directories_of(
            directories, ranks=sharing, local_rank=int(local_rank) if local_rank.isdecimal() else 0
        ),
        # Rounded up: 0 bytes would mean one chunk of everything.
        chunk_bytes=math.ceil(chunk_mb * MIB),
        fraction=fraction,
        host_bytes=round(host_memory_gb * GIB) // sharing,
        windows=windows,
    )


def _differences(present: OffloadSettings, asked: OffloadSettings) -> str:
    pairs = (
        (field.name, getattr(present, field.name), getattr(asked, field.name)) for field in fields(present)
    )
    told = [f"{name}={after}, and {before} is in use" for name, before, after in pairs if before != after]
    return "; ".join(told) or "another caller's"


def _in_range(value: object, low: float, high: float) -> bool:
    """Whether `value` is a finite number from `low` to `high`."""
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high
