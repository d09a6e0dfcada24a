"""The keys of a model that decide the names and shapes of its tensors; a checkpoint is sealed with them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from muon_offload_cli.config.schema import Config

SHAPE_KEYS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "attention_output_gate",
    "normalization",
    "swiglu",
    "qk_layernorm",
    "tied_embeddings",
    "add_bias_linear",
    "add_qkv_bias",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "experimental_attention_variant",
    "linear_attention_freq",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "mtp_num_layers",
    "moe.num_experts",
    "moe.ffn_hidden_size",
    "moe.shared_expert_ffn_hidden_size",
    "moe.shared_expert_gate",
    "moe.layer_freq",
    "moe.router_enable_expert_bias",
)


def shapes_of(config: Config) -> dict[str, Any]:
    """Return what the model's shape keys are set to, by full name."""
    return {f"model.{key}": attrgetter(key)(config.model) for key in SHAPE_KEYS}


def other_shapes(config: Config, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return keys whose values make another model than the saved one: saved value, present value.

    A key that is null on one side is passed over: Megatron fills it in, maybe with the other side's value.
    """
    present = shapes_of(config)
    return {
        key: (value, present[key])
        for key, value in saved.items()
        if value is not None and present.get(key) is not None and present[key] != value
    }
