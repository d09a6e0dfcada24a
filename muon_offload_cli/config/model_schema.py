"""The part of the configuration that says what is trained: the architecture, in Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Mixture-of-experts layers; `num_experts` null: a dense model.

    Names follow Megatron's flags without ``moe-``: `router_group_topk` is ``--moe-router-group-topk``.

    Attributes:
        num_experts: Routed experts of a layer.
        topk: Experts that a token visits, ``--moe-router-topk``.
        ffn_hidden_size: Width of a routed expert.
        shared_expert_ffn_hidden_size: Width of all shared experts together,
            ``--moe-shared-expert-intermediate-size``; null: there are none.
        shared_expert_gate: Shared experts are weighted by a gate of their own.
        layer_freq: Which layers have experts: a number N (every N-th, counted from the first) or a list
            such as ``([0]*1+[1]*26)``, 1 for experts; null: all layers.
        aux_loss_coeff: Weight of the load-balancing loss.
        load_balancing: ``aux_loss``, ``seq_aux_loss``, ``sinkhorn`` or ``none``.
        router_score_function: ``softmax`` or ``sigmoid``.
        router_pre_softmax: Scores are normalized over all experts before the best are chosen.
        router_enable_expert_bias: A bias that no gradient moves balances the experts (sigmoid only).
        router_bias_update_rate: Step of that bias.
        router_num_groups: Groups of experts for group-limited routing.
        router_group_topk: Groups that a token may visit.
        router_topk_scaling_factor: Factor on the chosen scores.
        router_dtype: ``fp32`` or ``fp64`` scores; null: as the model.
        grouped_gemm: One grouped kernel for all local experts; needs Transformer Engine.
    """

    num_experts: int | None = None
    topk: int = 2
    ffn_hidden_size: int | None = None
    shared_expert_ffn_hidden_size: int | None = None
    shared_expert_gate: bool = False
    layer_freq: str | None = None
    aux_loss_coeff: float = 0.0
    load_balancing: str = "aux_loss"
    router_score_function: str = "softmax"
    router_pre_softmax: bool = False
    router_enable_expert_bias: bool = False
    router_bias_update_rate: float = 0.001
    router_num_groups: int | None = None
    router_group_topk: int | None = None
    router_topk_scaling_factor: float | None = None
    router_dtype: str | None = None
    grouped_gemm: bool = False


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a GPT, in Megatron's names.

    Attributes:
        name: Name of the part below ``conf/model``.
        from_hf: Folder of a Hugging Face model: its ``config.json`` gives the numbers below that nothing else
            gives, and must agree with the others; null: there is none.
        hf_weights: Begin with the weights of that folder, through Megatron-Bridge; false: with random ones.
        hf_tokenizer: Take that folder's tokenizer where the tokens are no bytes.
        num_layers: Transformer layers, multi-token prediction not counted.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the feed-forward part of dense layers.
        num_attention_heads: Query heads.
        num_query_groups: Key-value heads; null: as many as query heads. Not read by latent attention.
        kv_channels: Size of one attention head; null: hidden_size / num_attention_heads.
        attention_output_gate: Attention's output is gated by a second half of the query projection.
        vocab_size: Token ids; null: taken from the data source (256 bytes and an end-of-document token).
        make_vocab_size_divisible_by: The vocabulary is padded to a multiple of this times `parallel.tp`.
        max_position_embeddings: Positions that the model was trained for; `from_hf` goes before a part
            here. Longer sequences are warned of; no layer depends on it. Null: not known.
        normalization: ``RMSNorm`` or ``LayerNorm``.
        norm_epsilon: Epsilon of all norms.
        apply_layernorm_1p: Norms multiply by 1 + weight, the weight born as zero.
        swiglu: Gated feed-forward layers.
        rotary_base: Base of the rotary positions.
        rotary_percent: Part of a head that is rotated.
        qk_layernorm: Norms on queries and keys; on both latents for latent attention.
        tied_embeddings: The output layer uses the embedding's weight.
        add_bias_linear: Biases on all linear layers.
        add_qkv_bias: Biases on the query-key-value projection alone.
        init_std: Standard deviation of new weights.
        multi_latent_attention: DeepSeek's attention; the five sizes below belong to it.
        q_lora_rank: Rank of the queries' latent; null: queries are projected at once.
        kv_lora_rank: Rank of the latent of keys and values.
        qk_head_dim: Size of a head's part without positions.
        qk_pos_emb_head_dim: Size of a head's rotated part.
        v_head_dim: Size of a value head.
        rope_type: ``rope`` or ``yarn``; read by latent attention.
        rotary_scaling_factor: YaRN's stretch of the context.
        mscale: YaRN's scale of attention.
        mscale_all_dim: The same over all dimensions.
        experimental_attention_variant: ``gated_delta_net`` puts linear attention into the layers that
            `linear_attention_freq` names.
        linear_attention_freq: A number N (every N-th layer keeps softmax attention) or a list of 0 and 1.
        linear_num_key_heads: Key heads of linear attention.
        linear_num_value_heads: Value heads of linear attention.
        linear_key_head_dim: Size of such a key head.
        linear_value_head_dim: Size of such a value head.
        linear_conv_kernel_dim: Width of the causal convolution before it.
        mtp_num_layers: Layers that predict a further token each; null: none.
        mtp_loss_scaling_factor: Weight of their loss.
        moe: Experts.
    """

    name: str = MISSING
    from_hf: str | None = None
    hf_weights: bool = True
    hf_tokenizer: bool = True
    num_layers: int = MISSING
    hidden_size: int = MISSING
    ffn_hidden_size: int = MISSING
    num_attention_heads: int = MISSING
    num_query_groups: int | None = None
    kv_channels: int | None = None
    attention_output_gate: bool = False
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    max_position_embeddings: int | None = None
    normalization: str = "RMSNorm"
    norm_epsilon: float = 1e-6
    apply_layernorm_1p: bool = False
    swiglu: bool = True
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    qk_layernorm: bool = False
    tied_embeddings: bool = False
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    init_std: float = 0.02
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_type: str = "rope"
    rotary_scaling_factor: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    experimental_attention_variant: str | None = None
    linear_attention_freq: str | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    moe: MoeConfig = field(default_factory=MoeConfig)
