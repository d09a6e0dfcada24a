"""Attention of other kinds, routers and further-token layers: what belongs together, and what is read at all.

Megatron's own conditions stand in megatron/core/transformer/transformer_config.py, most of them asserts at
start-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.keys import nearest
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem

VARIANTS = ("gated_delta_net",)
SCORE_FUNCTIONS = ("softmax", "sigmoid")
ROPE_TYPES = ("rope", "yarn")

# Sizes with DeepSeek-V3's values as examples.
_LATENT_SIZES = {"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
_LATENT_KEYS = (
    *_LATENT_SIZES,
    "q_lora_rank",
    "rope_type",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
)
# Sizes with Qwen3.5's values as examples.
_LINEAR_SIZES = {
    "linear_attention_freq": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@rule(name="latent-attention", reason="Latent attention has sizes of its own in place of query groups.")
def latent_attention(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse latent attention without its sizes, and next to what it replaces."""
    model = config.model
    if not model.multi_latent_attention:
        return
    yield from _missing(config, "model.multi_latent_attention=true", _LATENT_SIZES)
    if model.attention_output_gate:
        yield Problem(
            what="model.attention_output_gate=true, and Megatron gates no latent attention.",
            fix="model.attention_output_gate=false",
            keys=("model.attention_output_gate", "model.multi_latent_attention"),
        )
    if model.num_query_groups is not None:
        yield Problem(
            what=f"model.num_query_groups={model.num_query_groups}, and latent attention has none.",
            fix="model.num_query_groups=null",
            keys=("model.num_query_groups", "model.multi_latent_attention"),
        )
    if model.rope_type not in ROPE_TYPES:
        yield Problem(
            what=f"model.rope_type={model.rope_type} is neither rope nor yarn.",
            fix="model.rope_type=rope",
            keys=("model.rope_type",),
        )


@rule(name="linear-attention", reason="Gated delta nets have heads of their own, cut over tensor ranks.")
def linear_attention(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse an unknown kind of attention, missing sizes, and heads that do not divide."""
    model, parallel = config.model, config.parallel
    variant = model.experimental_attention_variant
    if variant is None:
        return
    if variant not in VARIANTS:
        yield Problem(
            what=f"model.experimental_attention_variant={variant} is not supported; gated_delta_net is.",
            fix="model.experimental_attention_variant=gated_delta_net",
            keys=("model.experimental_attention_variant",),
        )
        return
    yield from _missing(config, f"model.experimental_attention_variant={variant}", _LINEAR_SIZES)
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys is not None and values is not None and keys >= 1 and values % keys:
        yield Problem(
            what=f"model.linear_num_value_heads={values} is not a multiple of "
            f"model.linear_num_key_heads={keys}.",
            fix=f"model.linear_num_value_heads={-(-values // keys) * keys}",
            keys=("model.linear_num_value_heads", "model.linear_num_key_heads"),
        )
    parts = parallel.tp * parallel.cp
    if keys is not None and parts >= 1 and keys % parts:
        yield Problem(
            what=f"model.linear_num_key_heads={keys} is not a multiple of {parts} = "
            f"parallel.tp={parallel.tp} x parallel.cp={parallel.cp}.",
            fix=f"model.linear_num_key_heads={-(-keys // parts) * parts}",
            keys=("model.linear_num_key_heads", "parallel.tp", "parallel.cp"),
        )


def _missing(config: Config, asked: str, sizes: dict[str, int]) -> Iterator[Problem]:
    for name, example in sizes.items():
        value = getattr(config.model, name)
        if value is None or (isinstance(value, int) and value < 1):
            yield Problem(
                what=f"{asked} needs model.{name}, which is {'not set' if value is None else value}.",
                fix=f"model.{name}={example}",
                keys=(f"model.{name}",),
            )


@rule(
    name="unused-attention-keys",
    reason="Sizes of a kind of attention that the model lacks would be dropped in silence.",
)
def unused_attention_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse keys written for another kind of attention than the model's."""
    model = config.model
    unread: dict[str, str] = {}
    if not model.multi_latent_attention:
        unread |= dict.fromkeys(_LATENT_KEYS, "model.multi_latent_attention=false")
    if model.experimental_attention_variant is None:
        unread |= dict.fromkeys(_LINEAR_SIZES, "model.experimental_attention_variant=null")
    for name, reason in unread.items():
        if f"model.{name}" in written and getattr(model, name) is not None:
            what = f"model.{name} is written, and {reason} never reads it."
            yield Problem(what=what, fix="leave it out", keys=(f"model.{name}",))


@rule(name="router", reason="The router's options depend on one another.")
def router(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse scores, biases and groups of experts that Megatron's router does not take."""
    moe = config.model.moe
    if moe.num_experts is None:
        return
    score = moe.router_score_function
    if score not in SCORE_FUNCTIONS:
        near = nearest(score, SCORE_FUNCTIONS, count=1) or ["softmax"]
        yield Problem(
            what=f"model.moe.router_score_function={score} is neither softmax nor sigmoid.",
            fix=f"model.moe.router_score_function={near[0]}",
            keys=("model.moe.router_score_function",),
        )
    elif moe.router_enable_expert_bias and score != "sigmoid":
        yield Problem(
            what=f"model.moe.router_enable_expert_bias=true needs sigmoid scores, and "
            f"model.moe.router_score_function={score}.",
            fix="model.moe.router_score_function=sigmoid",
            keys=("model.moe.router_enable_expert_bias", "model.moe.router_score_function"),
        )
    groups, chosen = moe.router_num_groups, moe.router_group_topk
    if (groups is None) != (chosen is None):
        yield Problem(
            what=f"model.moe.router_num_groups={_shown(groups)} and model.moe.router_group_topk="
            f"{_shown(chosen)}: group-limited routing needs both.",
            fix="model.moe.router_num_groups=null model.moe.router_group_topk=null",
            keys=("model.moe.router_num_groups", "model.moe.router_group_topk"),
        )
    elif groups is not None and chosen is not None and not (1 <= chosen <= groups):
        yield Problem(
            what=f"model.moe.router_group_topk={chosen} is not between 1 and "
            f"model.moe.router_num_groups={groups}.",
            fix=f"model.moe.router_group_topk={max(1, groups)}",
            keys=("model.moe.router_num_groups", "model.moe.router_group_topk"),
        )
    elif groups and moe.num_experts >= 1 and moe.num_experts % groups:
        yield Problem(
            what=f"model.moe.num_experts={moe.num_experts} is not a multiple of "
            f"model.moe.router_num_groups={groups}.",
            fix="model.moe.router_num_groups=1 model.moe.router_group_topk=1",
            keys=("model.moe.num_experts", "model.moe.router_num_groups"),
        )


def _shown(value: int | None) -> str:
    return "null" if value is None else str(value)


@rule(name="shared-expert-gate", reason="There is nothing to gate without a shared expert.")
def shared_expert_gate(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a gate of shared experts that do not exist."""
    moe = config.model.moe
    if moe.num_experts is not None and moe.shared_expert_gate and not moe.shared_expert_ffn_hidden_size:
        yield Problem(
            what="model.moe.shared_expert_gate=true, and model.moe.shared_expert_ffn_hidden_size is not set.",
            fix="model.moe.shared_expert_gate=false",
            keys=("model.moe.shared_expert_gate", "model.moe.shared_expert_ffn_hidden_size"),
        )


@rule(name="zero-centred-norm", reason="Only RMSNorm has a zero-centred form in plain torch here.")
def zero_centred_norm(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse zero-centred LayerNorms."""
    model = config.model
    if model.apply_layernorm_1p and model.normalization != "RMSNorm":
        yield Problem(
            what=f"model.apply_layernorm_1p=true with model.normalization={model.normalization}.",
            fix="model.apply_layernorm_1p=false",
            keys=("model.apply_layernorm_1p", "model.normalization"),
        )


@rule(name="further-tokens", reason="Layers that predict further tokens are counted from one.")
def further_tokens(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a negative number of them, and a weight of their loss that is no weight."""
    layers, factor = config.model.mtp_num_layers, config.model.mtp_loss_scaling_factor
    if layers is not None and layers < 1:
        yield Problem(
            what=f"model.mtp_num_layers={layers} is no number of 1 or more.",
            fix="model.mtp_num_layers=null",
            keys=("model.mtp_num_layers",),
        )
    if not 0 <= factor < float("inf"):
        yield Problem(
            what=f"model.mtp_loss_scaling_factor={factor} is no weight of 0 or more.",
            fix="model.mtp_loss_scaling_factor=0.1",
            keys=("model.mtp_loss_scaling_factor",),
        )
