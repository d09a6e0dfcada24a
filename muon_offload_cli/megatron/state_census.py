"""What an optimizer of Megatron's holds on this rank, counted and hashed from the objects themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

MUON_ITEM_BYTES = 8
"""Momentum and master weight, fp32 each."""


def children(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers at the leaves of Megatron's chains."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
        return
    for child in chained:
        yield from children(child)


def is_layer_wise(optimizer: Any) -> bool:
    """Whether a layer-wise optimizer is in `optimizer`: only the Muon that it builds is taken over."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    return isinstance(optimizer, LayerWiseDistributedOptimizer) or any(
        map(is_layer_wise, getattr(optimizer, "chained_optimizers", ()))
    )


def is_muon(child: Any) -> bool:
    """Whether a leaf steps parameters with Muon."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    return isinstance(getattr(child, "optimizer", None), TensorParallelMuon)


def muon_parameters(optimizer: Any) -> int:
    """Count the elements that Muon owns on this rank."""
    return sum(
        parameter.numel()
        for child in children(optimizer)
        if is_muon(child)
        for group in child.optimizer.param_groups
        for parameter in group["params"]
    )


def sibling_state_bytes(optimizer: Any) -> int:
    """Count the bytes of masters and moments of the leaves that are not Muon's."""
    total = 0
    for child in children(optimizer):
        torch_optimizer = getattr(child, "optimizer", None)
        if torch_optimizer is None or is_muon(child):
            continue
        for parameter, state in torch_optimizer.state.items():
            total += sum(value.nbytes for value in state.values() if torch.is_tensor(value))
            # The torch optimizer steps fp32 masters; the model's own weights are lower precision or fp32.
            total += parameter.nbytes
    return total


def digests(model: Iterable[torch.nn.Module], optimizer: Any) -> dict[str, str]:
    """Hash all weights, and Muon's masters and momenta, in order of the parameters' names.

    Returns:
        SHA-256 in hexadecimal by kind: ``weights``, ``masters``, ``momenta``.
    """
    momenta: dict[int, torch.Tensor] = {}
    for child in children(optimizer):
        if is_muon(child):
            for parameter, state in child.optimizer.state.items():
                momenta[id(parameter)] = state["momentum_buffer"]
    # Virtual pipeline stages number their layers alike, each from 0.
    weights = {
        f"{stage} {name}": parameter
        for stage, chunk in enumerate(model)
        for name, parameter in sorted(chunk.named_parameters(), key=lambda pair: pair[0])
    }
    masters: dict[str, torch.Tensor] = {}
    for name, parameter in weights.items():
        master = getattr(parameter, "main_param", None)
        if master is not None and id(master) in momenta:
            masters[name] = master
    return {
        "weights": _digest(weights),
        "masters": _digest(masters),
        "momenta": _digest({name: momenta[id(master)] for name, master in masters.items()}),
    }


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
