"""Attaching the offloader to Megatron, before the optimizer is built."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any, Self

from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron import native_contract
from muon_offload_cli.megatron.arguments import differences
from muon_offload_cli.megatron.late_gradients import take_late_gradients
from muon_offload_cli.megatron.muon_child import make_muon_child
from muon_offload_cli.megatron.native_installation import NativeInstallation
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.storage.store import StoreError

MUON_CLASSES = ("TensorParallelMuon", "TensorParallelAdaptiveMuon")
"""What is taken over of megatron/core/optimizer/emerging_optimizers.py; not all releases have both."""


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
        self._substitutions = Substitutions()
        take_late_gradients(self._substitutions)

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
        self._substitutions.close()
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
            f"{differences(present.settings, settings)}.",
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
