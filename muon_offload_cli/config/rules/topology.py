"""How the world divides among the parallel sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from muon_offload_cli.config.keys import leaf_types
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import LARGEST, count_of, has_flag, setting, value_of
from muon_offload_cli.config.rules.stages import CUTS
from muon_offload_cli.config.schema import Config, ParallelConfig
from muon_offload_cli.config.vocabulary import vocabulary_size
from muon_offload_cli.errors import Level, Problem
from muon_offload_cli.topology import Topology
from muon_offload_cli.units import counted, round_up


def topology_of(config: Config) -> Topology:
    """Return the parallel sizes of a run; `etp` follows `tp` unless set, as in Megatron."""
    parallel = config.parallel
    return Topology(
        world_size=config.launcher.nodes * config.launcher.ranks_per_node,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.tp if parallel.etp is None else parallel.etp,
    )


def sizes_are_counts(config: Config) -> bool:
    """Tell whether every parallel size is at least one, so that it can divide."""
    sizes = topology_of(config)
    every = (sizes.world_size, sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.etp)
    return all(1 <= size <= LARGEST for size in every)


def largest_divisor(value: int, limit: int) -> int:
    """Return the largest divisor of `value` that is at most `limit` (both at least 1)."""
    best = 1
    # Up to the root alone: sizes come from a person, who may have written 2147483647.
    for small in range(1, math.isqrt(value) + 1):
        if value % small == 0:
            best = max(best, *(size for size in (small, value // small) if size <= limit), 1)
    return best


def laid_out(
    config: Config, *, ranks: int | None = None, tp: int | None = None, pp: int | None = None
) -> str:
    """Return all words that lay a run out near to what it asks for, so that no rule speaks after another.

    Args:
        config: The run.
        ranks: Ranks a node to begin with; those of the run, or its cluster's GPUs if they are fewer, if None.
        tp: Tensor-parallel size to begin with; that of the run, as far as heads allow, if None.
        pp: Pipeline stages to begin with; those of the run if None.
    """
    own, launcher, train = config.parallel, config.launcher, config.train
    tp, pp = tp or _tp_of_heads(config), pp or own.pp
    new: dict[str, object] = {"parallel.tp": tp, "parallel.pp": pp}
    if sizes_are_counts(config):
        group = tp * pp * own.cp
        most = config.cluster.gpus_per_node or launcher.ranks_per_node * group
        ranks = max(1, min(ranks or launcher.ranks_per_node, most))
        fits = group // math.gcd(group, launcher.nodes)
        if fits <= most:
            ranks = max(1, ranks // fits) * fits
        world = launcher.nodes * ranks
        pp = math.gcd(world, pp)
        cp = math.gcd(world // pp, own.cp)
        tp = math.gcd(world // pp // cp, tp)
        etp = None if own.etp is None else math.gcd(world // pp, own.etp)
        experts = config.model.moe.num_experts
        ep = largest_divisor(math.gcd(max(1, experts or 1), world // pp // (etp or tp)), own.ep)
        step = train.micro_batch * (world // pp // cp // tp)
        new = {
            "launcher.ranks_per_node": ranks,
            "parallel.tp": tp,
            "parallel.pp": pp,
            "parallel.cp": cp,
            "parallel.ep": ep,
            "parallel.etp": etp,
            "parallel.sequence_parallel": tp > 1 and (own.sequence_parallel or bool(experts)),
            "train.global_batch": round_up(train.global_batch, step) if step >= 1 else train.global_batch,
        }
        if pp != own.pp:
            # A cut of the layers belongs to the number of stages that it was made for.
            cuts = (setting(config, flag) for flag in CUTS)
            new |= {key: "null" for key, value in cuts if value is not None}
    return " ".join(
        f"{key}={str(value).lower()}"
        for key, value in new.items()
        if key not in leaf_types() or value != value_of(config, key)
    )


def _tp_of_heads(config: Config) -> int:
    """Return the tensor-parallel size of the run, or the next smaller one that divides its heads."""
    tp, heads, groups = config.parallel.tp, config.model.num_attention_heads, config.model.num_query_groups
    if tp < 1 or heads < 1 or (groups is not None and groups < 1):
        return tp
    return largest_divisor(math.gcd(heads, groups or heads), tp)


@rule(name="world-size", reason="Every rank belongs to one tensor, pipeline and context parallel group.")
def world_size(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a world that tp x pp x cp does not divide."""
    if not sizes_are_counts(config):
        return
    sizes = topology_of(config)
    group = sizes.tp * sizes.pp * sizes.cp
    if sizes.world_size % group:
        yield Problem(
            what=f"{_world(config)} is not a multiple of {group} = parallel.tp={sizes.tp} x "
            f"parallel.pp={sizes.pp} x parallel.cp={sizes.cp}.",
            fix=laid_out(config),
            keys=("launcher.nodes", "launcher.ranks_per_node", "parallel.tp", "parallel.pp", "parallel.cp"),
        )


@rule(name="expert-world-size", reason="Every rank belongs to one expert, expert-tensor and pipeline group.")
def expert_world_size(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a world that ep x etp x pp does not divide."""
    if not sizes_are_counts(config) or config.model.moe.num_experts is None:
        return
    sizes = topology_of(config)
    group = sizes.ep * sizes.etp * sizes.pp
    if sizes.world_size % group:
        yield Problem(
            what=f"{_world(config)} is not a multiple of {group} = parallel.ep={sizes.ep} x "
            f"expert tensor size {sizes.etp} x parallel.pp={sizes.pp}.",
            fix=laid_out(config),
            keys=("launcher.ranks_per_node", "parallel.ep", "parallel.etp", "parallel.pp"),
        )


@rule(name="experts-ep", reason="Every expert-parallel rank holds the same number of experts.")
def experts_over_ep(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse experts that ep does not divide, and ep without experts."""
    experts, ep = config.model.moe.num_experts, config.parallel.ep
    if ep <= 1:
        return
    if experts is None:
        yield Problem(
            what=f"parallel.ep={ep}, and the model {config.model.name} has no experts.",
            fix="parallel.ep=1",
            keys=("parallel.ep", "model.moe.num_experts"),
        )
    elif experts >= 1 and experts % ep:
        yield Problem(
            what=f"model.moe.num_experts={experts} is not a multiple of parallel.ep={ep}.",
            fix=laid_out(config),
            keys=("model.moe.num_experts", "parallel.ep"),
        )


@rule(name="heads-tp", reason="Every tensor-parallel rank holds whole attention heads.")
def heads_over_tp(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse heads and query groups that tp does not divide."""
    tp, heads, groups = config.parallel.tp, config.model.num_attention_heads, config.model.num_query_groups
    if tp < 1 or heads < 1:
        return
    if heads % tp:
        yield Problem(
            what=f"model.num_attention_heads={heads} is not a multiple of parallel.tp={tp}.",
            fix=laid_out(config),
            keys=("model.num_attention_heads", "parallel.tp"),
        )
    elif groups is not None and groups >= 1 and groups % tp:
        yield Problem(
            what=f"model.num_query_groups={groups} is not a multiple of parallel.tp={tp}.",
            fix=laid_out(config),
            keys=("model.num_query_groups", "parallel.tp"),
        )


@rule(name="ffn-tp", reason="The feed-forward matrices are cut by columns and rows over tensor parallelism.")
def ffn_over_tp(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse feed-forward and hidden sizes that the tensor-parallel sizes do not divide."""
    if not sizes_are_counts(config):
        return
    sizes, tp = topology_of(config), _tp_of_heads(config)
    cuts = [
        ("model.ffn_hidden_size", config.model.ffn_hidden_size, "parallel.tp", sizes.tp),
        ("model.moe.ffn_hidden_size", config.model.moe.ffn_hidden_size, "parallel.etp", sizes.etp),
        (
            "model.moe.shared_expert_ffn_hidden_size",
            config.model.moe.shared_expert_ffn_hidden_size,
            "parallel.tp",
            sizes.tp,
        ),
    ]
    for key, size, over, parts in cuts:
        if size is not None and size >= 1 and size % parts:
            yield Problem(
                what=f"{key}={size} is not a multiple of {over}={parts}.",
                fix=f"{key}={round_up(size, parts)}"
                if parts in (tp, config.parallel.etp)
                else laid_out(config),
                keys=(key, over),
            )


@rule(name="global-batch", reason="Every data-parallel rank takes the same number of micro batches a step.")
def global_batch(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a global batch that micro batch x data-parallel size does not divide."""
    if not sizes_are_counts(config):
        return
    sizes, micro, batch = topology_of(config), config.train.micro_batch, config.train.global_batch
    if sizes.dp < 1 or micro < 1 or batch < 1:
        return
    step = micro * sizes.dp
    if batch % step:
        yield Problem(
            what=f"train.global_batch={batch} is not a multiple of {step} = train.micro_batch={micro} x "
            f"data-parallel size {sizes.dp}.",
            fix=f"train.global_batch={-(-batch // step) * step}",
            keys=("train.global_batch", "train.micro_batch"),
        )


def length_step(parallel: ParallelConfig) -> int:
    """Return what sequence lengths must be a multiple of, by the rules ``sequence-parallel``, ``-cp``."""
    over_tp = parallel.tp if parallel.sequence_parallel else 1
    return max(1, math.lcm(over_tp, 2 * parallel.cp if parallel.cp > 1 else 1))


@rule(name="sequence-parallel", reason="Sequence parallelism cuts the sequence over tensor-parallel ranks.")
def sequence_parallel(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse sequence parallelism without tensor parallelism, and a sequence that does not divide."""
    parallel, length = config.parallel, config.train.sequence_length
    if not parallel.sequence_parallel:
        return
    if parallel.tp <= 1:
        yield Problem(
            what=f"parallel.sequence_parallel=true needs tensor parallelism, and parallel.tp={parallel.tp}.",
            fix="parallel.sequence_parallel=false",
            keys=("parallel.sequence_parallel", "parallel.tp"),
        )
    elif length >= 1 and length % parallel.tp:
        yield Problem(
            what=f"train.sequence_length={length} is not a multiple of parallel.tp={parallel.tp}, "
            "which sequence parallelism needs.",
            fix=f"train.sequence_length={round_up(length, parallel.tp)}"
            if _tp_of_heads(config) == parallel.tp
            else laid_out(config),
            keys=("train.sequence_length", "parallel.tp"),
        )


@rule(
    name="moe-sequence-parallel",
    reason="Megatron's experts under tensor parallelism need sequence parallelism.",
)
def moe_sequence_parallel(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Require sequence parallelism for experts with tp > 1."""
    if config.model.moe.num_experts and config.parallel.tp > 1 and not config.parallel.sequence_parallel:
        yield Problem(
            what=f"a model with experts and parallel.tp={config.parallel.tp} needs "
            "parallel.sequence_parallel=true.",
            fix="parallel.sequence_parallel=true",
            keys=("parallel.sequence_parallel", "parallel.tp", "model.moe.num_experts"),
        )


@rule(name="sequence-cp", reason="Context parallelism gives every rank two pieces of the sequence.")
def sequence_over_cp(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a sequence length that 2 x cp does not divide (Megatron's arguments.py, validate_args)."""
    cp, length = config.parallel.cp, config.train.sequence_length
    if cp > 1 and length >= 1 and length % (2 * cp):
        yield Problem(
            what=f"train.sequence_length={length} is not a multiple of {2 * cp} = 2 x parallel.cp={cp}.",
            fix=f"train.sequence_length={-(-length // (2 * cp)) * 2 * cp}",
            keys=("train.sequence_length", "parallel.cp"),
        )


@rule(name="gpus-per-node", reason="Each rank has a GPU of its own on the cluster that the recipe names.")
def gpus_per_node(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse more ranks than the cluster's nodes have GPUs."""
    gpus, ranks = config.cluster.gpus_per_node, config.launcher.ranks_per_node
    if gpus is not None and 1 <= gpus < ranks:
        yield Problem(
            what=f"launcher.ranks_per_node={ranks}, and a node of cluster={config.cluster.name} "
            f"has {counted(gpus, 'GPU')}.",
            fix=laid_out(config) or f"launcher.ranks_per_node={gpus}",
            keys=("launcher.ranks_per_node", "cluster.gpus_per_node"),
        )


@rule(name="tensor-parallel-nodes", reason="Tensor parallelism talks in every layer; a network is too slow.")
def tensor_parallel_nodes(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of a tensor-parallel group that reaches over several nodes."""
    tp, launcher = config.parallel.tp, config.launcher
    if launcher.nodes > 1 and tp > launcher.ranks_per_node >= 1:
        yield Problem(
            what=f"parallel.tp={tp} is more than launcher.ranks_per_node={launcher.ranks_per_node}: one "
            "tensor-parallel group would reach over several nodes.",
            fix=laid_out(config, tp=largest_divisor(_tp_of_heads(config), launcher.ranks_per_node)),
            keys=("parallel.tp", "launcher.ranks_per_node"),
            level=Level.WARNING,
        )


@rule(name="idle-gpus", reason="GPUs of a node that no rank uses are paid for all the same.")
def idle_gpus(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Note nodes of which only some GPUs are used, where there are several nodes."""
    gpus, launcher = config.cluster.gpus_per_node, config.launcher
    if not gpus or launcher.nodes <= 1 or not 1 <= launcher.ranks_per_node < gpus:
        return
    if fix := laid_out(config, ranks=gpus):
        yield Problem(
            what=f"launcher.ranks_per_node={launcher.ranks_per_node} on {launcher.nodes} nodes of {gpus} "
            "GPUs: the others stay idle.",
            fix=fix,
            keys=("launcher.ranks_per_node", "cluster.gpus_per_node"),
            level=Level.NOTE,
        )


@rule(
    name="vocabulary-padding", reason="Embedding and output rows are cut evenly over tensor-parallel ranks."
)
def vocabulary_padding(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a padding that is no count, and an unpadded vocabulary that tp does not divide."""
    tp, size = config.parallel.tp, config.model.vocab_size
    key, value = setting(config, "make_vocab_size_divisible_by")
    if value is not None and (count_of(value) or 0) < 1:
        yield Problem(what=f"{key}={value} is no number of 1 or more.", fix=f"{key}=128", keys=(key,))
    for flag in ("no_pad_vocab_size", "disable_pad_vocab_size"):
        if not has_flag(config, flag) or tp < 1 or (size is not None and size < 1):
            continue
        rows = vocabulary_size(config)
        if rows % tp:
            yield Problem(
                what=f"megatron.args.{flag} leaves {rows} rows of the vocabulary, no multiple of "
                f"parallel.tp={tp}.",
                fix=f"megatron.args.{flag}=null",
                keys=(f"megatron.args.{flag}", "model.vocab_size", "parallel.tp"),
            )


def _world(config: Config) -> str:
    launcher = config.launcher
    return (
        f"the world size {launcher.nodes * launcher.ranks_per_node} (launcher.nodes={launcher.nodes} x "
        f"launcher.ranks_per_node={launcher.ranks_per_node})"
    )
