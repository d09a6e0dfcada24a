"""Cases of config/rules/architecture.py."""

from __future__ import annotations

from tests.config.rule_cases.case import Case

CASES = [
    Case("latent-attention", "model.multi_latent_attention=true", "model=tiny_latent"),
    Case("latent-attention", "model=tiny_latent model.v_head_dim=0"),
    Case("latent-attention", "model=tiny_latent model.attention_output_gate=true"),
    Case("latent-attention", "model=tiny_latent model.num_query_groups=2"),
    Case("latent-attention", "model=tiny_latent model.rope_type=mrope"),
    Case("linear-attention", "model.experimental_attention_variant=gated_delta_net", "model=tiny_delta"),
    Case("linear-attention", "model=tiny_delta model.experimental_attention_variant=dsa"),
    Case("linear-attention", "model=tiny_delta model.linear_num_value_heads=3"),
    Case("linear-attention", "model=tiny_delta model.linear_num_key_heads=1"),
    Case("unused-attention-keys", "model.kv_lora_rank=512", "model=tiny_latent model.kv_lora_rank=512"),
    Case(
        "unused-attention-keys",
        "model.linear_attention_freq=4",
        "model=tiny_delta model.linear_attention_freq=4",
    ),
    Case("router", "model.moe.router_score_function=sigmoyd"),
    Case(
        "router",
        "model.moe.router_enable_expert_bias=true",
        "model.moe.router_enable_expert_bias=true model.moe.router_score_function=sigmoid",
    ),
    Case("router", "model.moe.router_num_groups=2"),
    Case("router", "model.moe.router_num_groups=2 model.moe.router_group_topk=3"),
    Case(
        "router",
        "model.moe.router_num_groups=3 model.moe.router_group_topk=1",
        "model.moe.router_num_groups=4 model.moe.router_group_topk=1",
    ),
    Case(
        "shared-expert-gate",
        "model.moe.shared_expert_gate=true",
        "model.moe.shared_expert_gate=true model.moe.shared_expert_ffn_hidden_size=64",
    ),
    Case(
        "zero-centred-norm",
        "model.apply_layernorm_1p=true model.normalization=LayerNorm",
        "model.apply_layernorm_1p=true",
    ),
    Case("further-tokens", "model.mtp_num_layers=0", "model.mtp_num_layers=1"),
    Case("further-tokens", "model.mtp_loss_scaling_factor=-1"),
]
