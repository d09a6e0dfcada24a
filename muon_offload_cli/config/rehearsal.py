"""A run shrunk until CPU ranks of one machine train it in a minute, with every kind of part in it. Pure.

What is kept is what can go wrong before a GPU is busy: the kinds of layers, the parallel layout, the
optimizer's paths, the engine and its pipeline, the data path, flags of Megatron.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from muon_offload_cli.config.changes import Change, changes
from muon_offload_cli.config.rehearsal_model import (
    layers_with_experts,
    layers_with_linear_attention,
    shrink_model,
)
from muon_offload_cli.config.schema import Config, Device, ParallelConfig
from muon_offload_cli.units import round_up

MAX_RANKS = 8
STEPS = 4
SEQUENCE = 64
CHUNK_MB = 0.25
"""Small models have a few MiB of state a rank; they should still have many chunks."""
STAGING_MB = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """A small run and how it differs from the real one.

    Attributes:
        config: What is run.
        changes: Keys that differ, in the schema's order.
        kept: Sentences on what is the same.
    """

    config: Config
    changes: tuple[Change, ...]
    kept: tuple[str, ...]


def rehearse(config: Config, *, shortest: int = 0) -> Rehearsal:
    """Shrink a run; `config` itself is not changed.

    Args:
        config: Composed, and not refused for anything but this machine.
        shortest: Sequence length without which the data has nothing to teach.
    """
    small = copy.deepcopy(config)
    small.device = Device.cpu
    small.cluster = type(small.cluster)()
    _shrink_layout(small)
    small.model, small.parallel = shrink_model(small)
    _shrink_training(small, ranks=small.launcher.ranks_per_node, shortest=shortest)
    small.offload.chunk_mb = min(small.offload.chunk_mb, CHUNK_MB)
    small.offload.staging_mb = min(small.offload.staging_mb, STAGING_MB)
    return Rehearsal(config=small, changes=changes(config, small), kept=tuple(_kept(config, small)))


def ranks_needed(parallel: ParallelConfig, *, experts: bool) -> int:
    """Return the smallest world that these parallel sizes divide."""
    etp = parallel.tp if parallel.etp is None else parallel.etp
    dense = parallel.tp * parallel.cp * parallel.pp
    return math.lcm(dense, parallel.ep * etp * parallel.pp) if experts else dense


def _shrink_layout(config: Config) -> None:
    """Halve the largest parallel size until the run fits, and keep two data-parallel ranks if there were."""
    parallel, launcher = config.parallel, config.launcher
    experts = config.model.moe.num_experts is not None
    world = launcher.nodes * launcher.ranks_per_node
    shared_out = world > parallel.tp * parallel.cp * parallel.pp
    while ranks_needed(parallel, experts=experts) > MAX_RANKS:
        name = max(("ep", "pp", "cp", "tp"), key=lambda size: int(getattr(parallel, size)))
        setattr(parallel, name, max(1, getattr(parallel, name) // 2))
        if parallel.etp is not None:
            parallel.etp = min(parallel.etp, parallel.tp)
    ranks = ranks_needed(parallel, experts=experts)
    dense = parallel.tp * parallel.cp * parallel.pp
    while shared_out and ranks // dense < 2 and ranks * 2 <= MAX_RANKS:
        ranks *= 2
    if world <= MAX_RANKS and world % ranks == 0:
        ranks = world
    launcher.nodes, launcher.ranks_per_node, launcher.node_rank = 1, ranks, 0
    launcher.master_address = launcher.master_port = None
    parallel.sequence_parallel = parallel.sequence_parallel and parallel.tp > 1


def _shrink_training(config: Config, *, ranks: int, shortest: int) -> None:
    train, parallel = config.train, config.parallel
    unit = math.lcm(parallel.tp, 2 * parallel.cp)
    train.steps = min(train.steps, STEPS)
    train.sequence_length = min(train.sequence_length, round_up(SEQUENCE, unit))
    train.sequence_length = max(train.sequence_length, round_up(shortest, unit))
    train.micro_batch = 1
    data_parallel = ranks // (parallel.tp * parallel.cp * parallel.pp)
    # The interleaved schedule wants a multiple of the stages.
    train.global_batch = data_parallel * max(2, parallel.pp)
    config.optimizer.lr_warmup_steps = min(config.optimizer.lr_warmup_steps, 1)


def _kept(config: Config, small: Config) -> list[str]:
    parallel = small.parallel
    sizes = [("TP", parallel.tp), ("PP", parallel.pp), ("CP", parallel.cp), ("EP", parallel.ep)]
    layout = "/".join(f"{name}{size}" for name, size in sizes if size > 1) or "data parallel only"
    real = config.parallel
    same = (parallel.tp, parallel.pp, parallel.cp, parallel.ep) == (real.tp, real.pp, real.cp, real.ep)
    offload = small.offload
    sentences = [
        f"layout {layout}{'' if same else ' (smaller than the real one)'}",
        f"layers: {', '.join(_kinds(small))}",
        f"optimizer {small.optimizer.name}, "
        + ("shard-aligned layout" if small.megatron.param_layout else "the older layer-wise path"),
        f"engine {offload.engine.name}, fraction {offload.fraction:g}, windows {offload.windows}, "
        f"host memory {offload.host_memory_gb} GiB",
        f"data {small.data.source.name}",
    ]
    if small.megatron.args:
        sentences.append("Megatron flags: " + ", ".join(sorted(small.megatron.args)))
    return sentences


def _kinds(config: Config) -> list[str]:
    model = config.model
    linear, experts = layers_with_linear_attention(model), layers_with_experts(model)
    kinds = []
    if 1 in linear:
        kinds.append("gated delta net")
    if 0 in linear:
        plain = "latent" if model.multi_latent_attention else "softmax"
        kinds.append(f"{'gated ' if model.attention_output_gate else ''}{plain} attention")
    if 0 in experts:
        kinds.append("dense")
    if 1 in experts:
        kinds.append("experts")
        if model.moe.shared_expert_ffn_hidden_size:
            kinds.append("a gated shared expert" if model.moe.shared_expert_gate else "a shared expert")
    if model.mtp_num_layers:
        kinds.append("a further token")
    return kinds
