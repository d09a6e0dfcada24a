"""What an optimizer of Megatron's holds on this rank, counted and hashed from the objects themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from muon_offload_cli.megatron.muon_state import MOMENTUM, SECOND_MOMENT, second_moment_shape
from muon_offload_cli.offload.plan import ParameterSpec

PLAIN_MUON_BYTES = 8
"""Of an element: momentum and master weight in fp32, the state that Megatron's own offloader knows."""


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
    return sum(parameter.numel() for _, parameter in _stepped_by_muon(optimizer))


def muon_state_bytes(optimizer: Any) -> int:
    """Count the bytes of Muon's masters, momenta and second moments, whether they are made yet or not."""
    return sum(
        sum(
            ParameterSpec(
                shape=tuple(parameter.shape), second_moment=second_moment_shape(muon, parameter)
            ).sizes
        )
        for muon, parameter in _stepped_by_muon(optimizer)
    )


def _stepped_by_muon(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each parameter of Muon's with the torch optimizer that steps it."""
    for child in children(optimizer):
        if is_muon(child):
            for group in child.optimizer.param_groups:
                for parameter in group["params"]:
                    yield child.optimizer, parameter


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


def native_host_bytes(optimizer: Any) -> int:
    """Count Muon's state that Megatron's own offloader keeps in pinned host memory between steps."""
    offloaders = (
        getattr(child, "_optimizer_state_offloader", None) for child in children(optimizer) if is_muon(child)
    )
    return sum(
        int(parameter.numel()) * PLAIN_MUON_BYTES
        for offloader in offloaders
        if offloader is not None and not hasattr(offloader, "buffers")
        for parameter in offloader.selected_params
    )


def sibling_disk_bytes(optimizer: Any) -> int:
    """Count the bytes of those leaves that Megatron's own offloader keeps in files (`native`)."""
    offloaders = (
        getattr(child, "_optimizer_state_offloader", None)
        for child in children(optimizer)
        if not is_muon(child)
    )
    found = (getattr(offloader, "buffers", None) for offloader in offloaders)
    return sum(buffers.nbytes for buffers in found if buffers is not None)


def digests(model: Iterable[torch.nn.Module], optimizer: Any) -> dict[str, str]:
    """Hash all weights, and Muon's masters and state, in order of the parameters' names.

    Returns:
        SHA-256 in hexadecimal by kind: ``weights``, ``masters``, ``momenta``, and ``second_moments`` if there
        are any.
    """
    states: dict[int, Any] = {}
    for child in children(optimizer):
        if is_muon(child):
            states |= {id(parameter): state for parameter, state in child.optimizer.state.items()}
    # Virtual pipeline stages number their layers alike, each from 0.
    weights = {
        f"{stage} {name}": parameter
        for stage, chunk in enumerate(model)
        for name, parameter in sorted(chunk.named_parameters(), key=lambda pair: pair[0])
    }
    masters: dict[str, torch.Tensor] = {}
    for name, parameter in weights.items():
        master = getattr(parameter, "main_param", None)
        if master is not None and id(master) in states:
            masters[name] = master
    found = {"weights": _digest(weights), "masters": _digest(masters)}
    for kind, key in (("momenta", MOMENTUM), ("second_moments", SECOND_MOMENT)):
        of_kind = {name: states[id(master)].get(key) for name, master in masters.items()}
        if kind == "momenta" or any(tensor is not None for tensor in of_kind.values()):
            found[kind] = _digest(of_kind)
    return found


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
