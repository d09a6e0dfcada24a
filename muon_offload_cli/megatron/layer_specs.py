"""Which modules a model is built from: Megatron's own specs, from Transformer Engine or its local layers."""

from __future__ import annotations

import copy
from typing import Any


def block_specs(
    config: Any, *, transformer_engine: bool, normalization: str, vp_stage: int | None
) -> tuple[Any, Any]:
    """Return the specs of this pipeline stage's decoder layers, and of its multi-token prediction.

    Args:
        config: Megatron's transformer config.
        transformer_engine: Build from Transformer Engine; False: from Megatron's own local layers.
        normalization: ``RMSNorm`` or ``LayerNorm``.
        vp_stage: Virtual stage, None without them.

    Returns:
        A `TransformerBlockSubmodules`, and a `MultiTokenPredictionBlockSubmodules` or None.
    """
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )

    # Everything but the attention variant; Megatron's functions for standard layers refuse the latter.
    standard = copy.copy(config)
    standard.experimental_attention_variant = None
    block = get_gpt_decoder_block_spec(
        standard, use_transformer_engine=transformer_engine, normalization=normalization, vp_stage=vp_stage
    )
    layers = get_gpt_decoder_layer_specs(
        standard, use_transformer_engine=transformer_engine, normalization=normalization
    )
    if config.multi_latent_attention:
        layers = [_with_latent_attention(config, layer, transformer_engine) for layer in layers]
        block.layer_specs = _of_this_stage(config, layers, vp_stage)
    if config.experimental_attention_variant is not None:
        if transformer_engine:
            layers = variants.get_transformer_layer_with_experimental_attention_variant_spec(config)
        else:
            layers = _local_variant_layers(config, layers, variants)
        block.layer_specs = _of_this_stage(config, layers, vp_stage)
    if not config.mtp_num_layers:
        return block, None
    # The last decoder layer is the pattern of the predicting ones, wherever this stage ends.
    return block, get_gpt_mtp_block_spec(
        config, layers[-1], use_transformer_engine=transformer_engine, vp_stage=vp_stage
    )


def _local_variant_layers(config: Any, layers: list[Any], variants: Any) -> list[Any]:
    """Put gated delta nets into local layers, which Megatron's own spec builds from Transformer Engine only.

    The input norm stays a module of its own, because local projections fuse none.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    if config.experimental_attention_variant != "gated_delta_net":
        raise ValueError(
            f"{config.experimental_attention_variant} layers need Transformer Engine, which is not installed"
        )
    backend = LocalSpecProvider()
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_linear(),
            out_norm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm"),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    return [
        _with_attention(layer, delta_net) if is_linear else layer
        for layer, is_linear in zip(layers, variants.get_linear_attention_pattern(config), strict=True)
    ]


def _with_attention(layer: Any, attention: Any) -> Any:
    changed = copy.copy(layer)
    changed.submodules = copy.copy(layer.submodules)
    changed.submodules.self_attention = attention
    return changed


def _with_latent_attention(config: Any, layer: Any, transformer_engine: bool) -> Any:
    """Make up for what Megatron's specs of latent attention lack (0.18.2, 0.19.2)."""
    from megatron.core.transformer.identity_op import IdentityOp

    attention = copy.copy(layer.submodules.self_attention)
    attention.submodules = copy.copy(attention.submodules)
    if not transformer_engine:
        attention.submodules.core_attention = _latent_core_attention()
    if config.q_lora_rank is None:
        attention.module = _direct_query_attention()
        attention.submodules.q_layernorm = IdentityOp
    return _with_attention(layer, attention)


def _direct_query_attention() -> Any:
    """Return latent attention whose queries have no latent and so no norm, as Moonlight's.

    With ``--qk-layernorm`` 0.19.2 norms the projection's input a second time instead
    (megatron/core/transformer/mla_qk_norm_config.py), and refuses local layers.
    """
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    class DirectQueryAttention(MLASelfAttention):  # type: ignore[misc]
        """Latent attention for keys and values alone."""

        def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
            return {
                "linear_q_proj": submodules.linear_q_proj,
                "linear_q_up_proj": IdentityOp,
                "linear_kv_up_proj": submodules.linear_kv_up_proj,
                "q_layernorm": IdentityOp,
                "kv_layernorm": submodules.kv_layernorm or IdentityOp,
            }

    return DirectQueryAttention


def _latent_core_attention() -> Any:
    """Return local dot-product attention whose value heads have a size of their own.

    Latent attention passes both sizes to its core; Megatron's local core takes neither (0.18.2, 0.19.2).
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
        """Softmax attention with heads of `k_channels` for queries and keys, `v_channels` for values."""

        def __init__(
            self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            super().__init__(*args, **kwargs)
            # Read for the shape of the output alone; the scale of the scores is given by the caller. The
            # base class of Megatron's attention builds one without sizes first, which is thrown away.
            if v_channels is not None:
                self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return LatentDotProductAttention


def _of_this_stage(config: Any, layers: list[Any], vp_stage: int | None) -> list[Any]:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if config.pipeline_model_parallel_layout is not None:
        numbers = config.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage
        )
        return [layers[number] for number in numbers]
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return layers[offset : offset + get_num_layers_to_build(config, vp_stage=vp_stage)]
