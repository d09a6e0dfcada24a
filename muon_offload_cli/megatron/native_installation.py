"""The hold on Megatron's own chunked offloader: the mapped class in its place, configs that ask for it."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

from muon_offload_cli.errors import does_not_fit, wrong
from muon_offload_cli.megatron import native_contract
from muon_offload_cli.megatron.native import make_mapped_offloader
from muon_offload_cli.megatron.native_view import MuonView
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.offload.watched import Watched
from muon_offload_cli.units import MIB


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
