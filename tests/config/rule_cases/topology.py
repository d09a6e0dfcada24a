"""Cases of config/rules/topology.py."""

from __future__ import annotations

from muon_offload_cli.errors import Level
from tests.config.rule_cases.case import ARGS, Case

CASES = [
    Case("world-size", "launcher.ranks_per_node=3", "launcher.ranks_per_node=6"),
    Case("world-size", "launcher.nodes=3 launcher.ranks_per_node=1 parallel.tp=2"),
    Case("expert-world-size", "launcher.ranks_per_node=6", "launcher.ranks_per_node=8"),
    Case("expert-world-size", "parallel.ep=4", "parallel.ep=4 parallel.etp=1"),
    Case("expert-world-size", "launcher.ranks_per_node=1"),
    Case("experts-ep", "model.moe.num_experts=9", "model.moe.num_experts=10"),
    Case("experts-ep", "model=tiny_dense", "model=tiny_dense parallel=tp2"),
    Case("heads-tp", "parallel.tp=3", "parallel.tp=4"),
    Case("heads-tp", "parallel.tp=8"),
    Case("ffn-tp", "model.ffn_hidden_size=513"),
    Case("ffn-tp", "model.moe.ffn_hidden_size=255", "model.moe.ffn_hidden_size=255 parallel.etp=1"),
    Case(
        "tensor-parallel-nodes",
        "launcher.nodes=2 launcher.ranks_per_node=2 parallel.tp=4",
        "launcher.nodes=2 launcher.ranks_per_node=4 parallel.tp=4",
        level=Level.WARNING,
    ),
    Case("idle-gpus", "cluster=h200_x8 launcher.nodes=2", "cluster=h200_x8", level=Level.NOTE),
    Case(
        "idle-gpus",
        "cluster=h200_x8 launcher.nodes=2 launcher.ranks_per_node=3 parallel=data parallel.pp=3",
        "cluster=h200_x8 launcher.nodes=2 launcher.ranks_per_node=6 parallel=data parallel.pp=3",
        level=Level.NOTE,
    ),
    Case(
        "vocabulary-padding",
        "model.make_vocab_size_divisible_by=0",
        "model.make_vocab_size_divisible_by=64",
    ),
    Case(
        "vocabulary-padding",
        f"{ARGS}no_pad_vocab_size=true",
        f"{ARGS}no_pad_vocab_size=true model.vocab_size=258",
    ),
    Case(
        "vocabulary-padding",
        f"{ARGS}disable-pad-vocab-size=true model.vocab_size=259",
        f"{ARGS}disable-pad-vocab-size=true model.vocab_size=259 parallel.tp=1",
    ),
    Case("global-batch", "train.global_batch=6", "train.global_batch=8"),
    Case("sequence-parallel", "parallel.tp=1", "parallel.tp=1 parallel.sequence_parallel=false"),
    Case("sequence-parallel", "train.sequence_length=127"),
    Case("moe-sequence-parallel", "parallel.sequence_parallel=false"),
    Case("sequence-cp", "parallel.cp=2 train.sequence_length=130", "parallel.cp=2"),
    Case("gpus-per-node", "cluster=h200_x1", "cluster=gb300_x4"),
]
