"""What Muon keeps of a parameter beside its master: the keys of its state, and their tensors in a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from muon_offload_cli.errors import wrong
from muon_offload_cli.offload.offloader import ChunkState

MOMENTUM = "momentum_buffer"
"""Key of Muon's state (emerging_optimizers, OrthogonalizedOptimizer)."""

SECOND_MOMENT = "moment2_buffer"
"""Key of what adaptive Muon keeps as well (emerging_optimizers, AdaptiveMuon)."""


def second_moment_shape(optimizer: Any, parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape of the second moment that `optimizer` would keep of `parameter`; None: it keeps none.

    Asked of the optimizer itself, on the meta device: adaptive Muon has an element, a row or column, or one
    number of it, as its method says.

    Raises:
        UserError: It keeps state that is not known here, or none of what is.
    """
    if not hasattr(optimizer, "moment2_method"):
        return None
    stand_in = torch.nn.Parameter(torch.empty(parameter.shape, device="meta"))
    optimizer._init_group({"params": [stand_in]}, skip_non_grad_params=False)
    state = optimizer.state.pop(stand_in)
    if set(state) != {MOMENTUM, SECOND_MOMENT}:
        raise wrong(
            f"{type(optimizer).__name__} keeps {', '.join(state)}, which is not what can be offloaded",
            "optimizer.name=dist_muon",
            "optimizer.name",
        )
    return tuple(state[SECOND_MOMENT].shape)


def members_of(state: ChunkState) -> Iterator[tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield index, master and optimizer state, by key, of each parameter of a chunk."""
    for place, index in enumerate(state.parameters):
        kept = {MOMENTUM: state.momenta[place]}
        if state.second_moments:
            kept[SECOND_MOMENT] = state.second_moments[place]
        yield index, state.masters[place], kept
