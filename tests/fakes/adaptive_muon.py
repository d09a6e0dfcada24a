"""Adaptive Muon that can be stepped; that of megatron-core 0.19.2 over emerging-optimizers 0.3.0 cannot."""

from __future__ import annotations

from typing import Any


def adaptive_muon_with_its_scale() -> type[Any]:
    """Return Megatron's class with what it lacks: two attributes that `AdaptiveMuon.step` reads."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon

    class AdaptiveMuonWithItsScale(TensorParallelAdaptiveMuon):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scale_mode, self.extra_scale_factor = "spectral", 1.0

    return AdaptiveMuonWithItsScale
