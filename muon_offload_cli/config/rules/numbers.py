"""Numbers outside the range in which they mean anything, and places that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from muon_offload_cli.config.rules.directory import FOLDERS
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import LARGEST, in_range, value_of
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem

# Counts of which there is at least one, with a value that is always possible.
_AT_LEAST_ONE = {
    "launcher.nodes": 1,
    "launcher.ranks_per_node": 1,
    "parallel.tp": 1,
    "parallel.pp": 1,
    "parallel.cp": 1,
    "parallel.ep": 1,
    "parallel.etp": 1,
    "train.steps": 1,
    "train.sequence_length": 1024,
    "train.micro_batch": 1,
    "train.global_batch": 8,
    "optimizer.muon_num_ns_steps": 5,
    "offload.io_threads": 8,
    "offload.windows": 3,
    "model.num_layers": 1,
    "model.hidden_size": 256,
    "model.ffn_hidden_size": 512,
    "model.num_attention_heads": 1,
    "model.num_query_groups": 1,
    "model.kv_channels": 64,
    "model.vocab_size": 256,
    "model.max_position_embeddings": 4096,
    "model.rotary_base": 10000,
    "model.moe.num_experts": 1,
    "model.moe.topk": 1,
    "model.moe.ffn_hidden_size": 256,
    "model.moe.shared_expert_ffn_hidden_size": 256,
}
_NOT_NEGATIVE = {
    "train.seed": 1234,
    "launcher.node_rank": 0,
    "optimizer.lr_warmup_steps": 0,
    "optimizer.min_lr": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_grad": 0.0,
    "checkpoint.interval": 0,
    "cluster.gpus_per_node": 0,
    "cluster.host_memory_gb": 0,
    "model.moe.aux_loss_coeff": 0.0,
}
_POSITIVE = {
    "cluster.read_gb_s": 2.0,
    "cluster.write_gb_s": 2.0,
    "optimizer.lr": 3e-4,
    "optimizer.adam_eps": 1e-8,
    "offload.staging_mb": 192,
    "model.norm_epsilon": 1e-6,
    "model.init_std": 0.02,
}
# Decays: the state would never forget at 1.
_BELOW_ONE = {"optimizer.muon_momentum": 0.95, "optimizer.adam_beta1": 0.9, "optimizer.adam_beta2": 0.95}

_RANGES: tuple[tuple[dict[str, Any], Callable[[float], bool], str], ...] = (
    (_AT_LEAST_ONE, lambda x: in_range(x, 1), "1 or more"),
    (_NOT_NEGATIVE, lambda x: in_range(x, 0), "0 or more"),
    (_POSITIVE, lambda x: in_range(x, 0) and x > 0, "more than 0"),
    (_BELOW_ONE, lambda x: in_range(x, 0, 1) and x < 1, "0 or more and below 1"),
    ({"model.rotary_percent": 1.0}, lambda x: in_range(x, 0, 1) and x > 0, "more than 0, at most 1"),
    ({"launcher.master_port": 29500}, lambda x: in_range(x, 1, 65535), "a port, 1 to 65535"),
)


@rule(name="number-range", reason="Counts start at one, rates are finite; Megatron checks few of them.")
def number_range(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse numbers that are negative, zero, infinite or absurd where that means nothing."""
    for keys, allowed, words in _RANGES:
        for key, example in keys.items():
            value = value_of(config, key)
            if value is None or allowed(value):
                continue
            shown = str(value) if isinstance(value, float) or abs(value) < 10**30 else f"{str(value)[:12]}..."
            too_large = ", and below 2**31" if value > LARGEST else ""
            what = f"{key}={shown} is out of range: it must be {words}{too_large}."
            yield Problem(what=what, fix=f"{key}={example}", keys=(key,))


def with_own_number(problem: Problem, own: Mapping[str, Any]) -> Problem:
    """Offer the number that the recipe itself has in the place of one that is always possible.

    Args:
        problem: What a rule found.
        own: The recipe's own values of keys that the command line sets.
    """
    if problem.rule != number_range.name:
        return problem
    (key,) = problem.keys
    number = own.get(key)
    allowed = next(allowed for keys, allowed, _ in _RANGES if key in keys)
    if not isinstance(number, int | float) or not allowed(number):
        return problem
    return replace(problem, fix=f"{key}={number}")


@rule(name="node-rank", reason="Each machine of a run has its own number, counted from 0.")
def node_rank(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a node number beyond the nodes."""
    launcher = config.launcher
    if 1 <= launcher.nodes <= launcher.node_rank:
        yield Problem(
            what=f"launcher.node_rank={launcher.node_rank} with launcher.nodes={launcher.nodes}: "
            f"nodes are numbered 0 to {launcher.nodes - 1}.",
            fix=f"launcher.node_rank={launcher.nodes - 1}",
            keys=("launcher.node_rank", "launcher.nodes"),
        )


@rule(name="empty-path", reason="An empty path is the working folder, which nobody means by it.")
def empty_path(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse paths that are set and empty; that of the state has rules of its own."""
    for key in (*FOLDERS, "megatron.path", "megatron.entrypoint"):
        if value_of(config, key) == "":
            yield Problem(what=f"{key}= is empty.", fix=f"{key}=null", keys=(key,))


@rule(
    name="meeting-point",
    reason="Several machines can only meet at an address that all of them know.",
    machine=True,
)
def meeting_point(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Require address and port of node 0 for more than one node."""
    if config.launcher.nodes <= 1:
        return
    nodes = f"launcher.nodes={config.launcher.nodes}"
    if not config.launcher.master_address:
        yield Problem(
            what=f"{nodes} needs launcher.master_address, the host name of node 0.",
            fix="launcher.master_address=HOSTNAME",
            keys=("launcher.master_address",),
        )
    if config.launcher.master_port is None:
        yield Problem(
            what=f"{nodes} needs launcher.master_port, a free port on node 0.",
            fix="launcher.master_port=29500",
            keys=("launcher.master_port",),
        )
