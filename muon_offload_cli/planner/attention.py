"""The parameters of the kinds of attention, in the order in which Megatron registers them.

Sources: megatron/core/transformer/{attention,multi_latent_attention}.py and megatron/core/ssm/gated_delta_net
of megatron-core 0.19.2. A module's own parameters come before those of its children.
"""

from __future__ import annotations

from collections.abc import Iterator

from muon_offload_cli.config.model_schema import ModelConfig
from muon_offload_cli.planner.tensors import Layers, Piece, column_cut, fused_norm, norm, row_cut


def attention(model: ModelConfig, tp: int, layers: Layers) -> Iterator[Piece]:
    """Yield self-attention with softmax: latent, gated or plain, as the model says."""
    if model.multi_latent_attention:
        return _latent(model, tp, layers)
    return _plain(model, tp, layers)


def norm_is_fused(model: ModelConfig, layers: Layers, *, linear: bool) -> bool:
    """Tell whether the layer's input norm lives inside the attention's first projection."""
    return layers is Layers.TRANSFORMER_ENGINE and (linear or not model.multi_latent_attention)


def _plain(model: ModelConfig, tp: int, layers: Layers) -> Iterator[Piece]:
    heads = model.num_attention_heads
    head_size = model.kv_channels or model.hidden_size // heads
    groups = model.num_query_groups or heads
    # A gate is as wide as the queries.
    rows = (heads * (2 if model.attention_output_gate else 1) + 2 * groups) * head_size
    bias = model.add_bias_linear
    yield from row_cut("linear_proj", model.hidden_size, heads * head_size, tp, bias=bias)
    if layers is Layers.TRANSFORMER_ENGINE:
        yield from fused_norm("linear_qkv", model.hidden_size, model.normalization)
    yield from column_cut("linear_qkv", rows, model.hidden_size, tp, bias=bias or model.add_qkv_bias)
    if model.qk_layernorm:
        yield from norm("q_layernorm", head_size, model.normalization)
        yield from norm("k_layernorm", head_size, model.normalization)


def _latent(model: ModelConfig, tp: int, layers: Layers) -> Iterator[Piece]:
    """DeepSeek's attention: projections down to a latent and up to the heads."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    position = model.qk_pos_emb_head_dim or 0
    query = (model.qk_head_dim or 0) + position
    value = model.v_head_dim or 0
    latent = model.kv_lora_rank or 0
    engine = layers is Layers.TRANSFORMER_ENGINE
    # Transformer Engine repeats the small projections on every rank; local layers cut them.
    down = 1 if engine else tp
    yield from row_cut("linear_proj", hidden, heads * value, tp, bias=model.add_bias_linear)
    if model.q_lora_rank is None:
        yield from column_cut("linear_q_proj", heads * query, hidden, tp, bias=False)
    else:
        yield from column_cut("linear_q_down_proj", model.q_lora_rank, hidden, down, bias=False)
        if model.qk_layernorm and engine:
            yield from fused_norm("linear_q_up_proj", model.q_lora_rank, model.normalization)
        yield from column_cut("linear_q_up_proj", heads * query, model.q_lora_rank, tp, bias=False)
    yield from column_cut("linear_kv_down_proj", latent + position, hidden, down, bias=False)
    if model.qk_layernorm and engine:
        yield from fused_norm("linear_kv_up_proj", latent, model.normalization)
    rows = heads * ((model.qk_head_dim or 0) + value)
    yield from column_cut("linear_kv_up_proj", rows, latent, tp, bias=False)
    if model.qk_layernorm and not engine:
        if model.q_lora_rank is not None:
            yield from norm("q_layernorm", model.q_lora_rank, model.normalization)
        yield from norm("kv_layernorm", latent, model.normalization)


def gated_delta_net(model: ModelConfig, tp: int, layers: Layers) -> Iterator[Piece]:
    """Yield linear attention: queries, keys, values, their gate, and two gates a value head in one matrix."""
    value_heads, value_size = model.linear_num_value_heads or 0, model.linear_value_head_dim or 0
    keys = (model.linear_num_key_heads or 0) * (model.linear_key_head_dim or 0)
    values = value_heads * value_size
    yield Piece(name="dt_bias", shape=(value_heads // tp,), parts=tp)
    yield Piece(name="A_log", shape=(value_heads // tp,), parts=tp)
    if layers is Layers.TRANSFORMER_ENGINE:
        yield from fused_norm("in_proj", model.hidden_size, model.normalization)
    rows = 2 * keys + 2 * values + 2 * value_heads
    yield from column_cut("in_proj", rows, model.hidden_size, tp, bias=False)
    # One filter a channel: three dimensions, so Adam steps it.
    shape = ((2 * keys + values) // tp, 1, model.linear_conv_kernel_dim or 0)
    yield Piece(name="conv1d.weight", shape=shape, parts=tp)
    yield from norm("out_norm", value_size, model.normalization)
    yield from row_cut("out_proj", model.hidden_size, values, tp, bias=False)
