"""Tensor-parallel peers step their parameters in one order, or wait for each other for ever.

Stepping a tensor-parallel parameter runs a collective, so peers must visit the same parameters in the same
chunks. They plan apart, each from its own shapes and settings; here they compare before the first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from muon_offload_cli.errors import wrong
from muon_offload_cli.offload.plan import ChunkPlan, ParameterSpec, Tier

EXPERT_DOMAIN = {False: "dense", True: "expert"}


def demand_same_plan(
    plan: ChunkPlan, parameters: Sequence[ParameterSpec], process_groups: Any, device: torch.device
) -> None:
    """Compare this rank's chunks with those of its tensor-parallel peers, dense and expert ones apart.

    Args:
        plan: This rank's plan.
        parameters: Its parameters; their domain is whether they are experts'.
        process_groups: Megatron's `ProcessGroupCollection`; None where nothing is parallel.
        device: Where the group's backend exchanges tensors.

    Raises:
        UserError: Some peers differ; raised on every peer, with their ranks.
    """
    for expert, name in EXPERT_DOMAIN.items():
        group = getattr(process_groups, "expt_tp" if expert else "tp", None)
        if group is None or group.size() == 1 or not any(p.domain == expert for p in parameters):
            continue
        mine = torch.tensor(fingerprint(plan, parameters, expert), dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(everyone, mine, group=group)
        found = [tuple(map(int, peer.tolist())) for peer in everyone]
        if len(set(found)) > 1:
            ranks = torch.distributed.get_process_group_ranks(group)
            told = ", ".join(
                f"rank {rank} has {chunks} chunks of {count} parameters"
                for rank, (_, chunks, count) in zip(ranks, found, strict=True)
            )
            raise wrong(
                f"tensor-parallel peers cut their {name} parameters into different chunks: {told}.",
                "give every rank the same offload.engine, offload.chunk_mb and offload.fraction",
                "offload.chunk_mb",
                "offload.fraction",
            )


def fingerprint(plan: ChunkPlan, parameters: Sequence[ParameterSpec], domain: object) -> tuple[int, int, int]:
    """Return a hash of the shapes of `domain` in the order and chunks in which they are stepped.

    Chunks on the device are visited apart from the others; which of the others are in host memory is a
    rank's own affair.

    Returns:
        The hash as a signed number of 64 bits, the number of chunks, and the number of parameters.
    """
    chunks = [
        (chunk.tier is Tier.GPU, [parameters[index].shape for index in chunk.parameters])
        for chunk in plan.chunks
        if parameters[chunk.parameters[0]].domain == domain
    ]
    digest = hashlib.blake2b(repr(chunks).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True), len(chunks), sum(len(shapes) for _, shapes in chunks)
