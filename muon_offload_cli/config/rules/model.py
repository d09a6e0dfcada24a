"""Facts of the model that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.topology import largest_divisor
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem


@rule(name="head-size", reason="Without kv_channels the hidden size is cut into heads evenly.")
def head_size(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse heads that do not divide the hidden size."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels is None and hidden >= 1 and heads >= 1 and hidden % heads:
        yield Problem(
            what=f"model.hidden_size={hidden} is not a multiple of model.num_attention_heads={heads}, "
            "and model.kv_channels is not set.",
            fix=f"model.hidden_size={-(-hidden // heads) * heads}",
            keys=("model.hidden_size", "model.num_attention_heads", "model.kv_channels"),
        )


@rule(name="query-groups", reason="Each query group serves the same number of heads.")
def query_groups(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse query groups that do not divide the heads."""
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    if groups is not None and groups >= 1 and heads >= 1 and heads % groups:
        yield Problem(
            what=f"model.num_attention_heads={heads} is not a multiple of model.num_query_groups={groups}.",
            fix=f"model.num_query_groups={largest_divisor(heads, groups)}",
            keys=("model.num_attention_heads", "model.num_query_groups"),
        )


@rule(name="top-k", reason="A token cannot visit more experts than there are.")
def top_k(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a top-k beyond the number of experts."""
    moe = config.model.moe
    if moe.num_experts is not None and 1 <= moe.num_experts < moe.topk:
        yield Problem(
            what=f"model.moe.topk={moe.topk}, and model.moe.num_experts={moe.num_experts}.",
            fix=f"model.moe.topk={moe.num_experts}",
            keys=("model.moe.topk", "model.moe.num_experts"),
        )


@rule(
    name="unused-expert-keys", reason="A setting that a dense model never reads would be dropped in silence."
)
def unused_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse keys of experts written for a model without any."""
    if config.model.moe.num_experts is not None:
        return
    for key in sorted(written):
        if key.startswith("model.moe.") and key != "model.moe.num_experts":
            what = f"{key} is written, and the model {config.model.name} has no experts."
            yield Problem(what=what, fix="leave it out, or set model.moe.num_experts", keys=(key,))


@rule(name="normalization", reason="Megatron's local layers have two kinds of norm.")
def normalization(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a norm that Megatron does not have."""
    if config.model.normalization not in ("RMSNorm", "LayerNorm"):
        yield Problem(
            what=f"model.normalization={config.model.normalization} is neither RMSNorm nor LayerNorm.",
            fix="model.normalization=RMSNorm",
            keys=("model.normalization",),
        )
