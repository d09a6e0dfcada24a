"""The model provider: Megatron's GPT from Megatron's flags."""

from __future__ import annotations

from typing import Any

from muon_offload_cli.megatron.layer_specs import block_specs


def make_model_provider(*, transformer_engine: bool) -> Any:
    """Return a ``model_provider`` for Megatron's `pretrain`.

    A model provider (and not a model config) is what wires the layer-wise parameter layout with its
    DistributedOptimizer sibling in megatron-core 0.19.2.

    Args:
        transformer_engine: Build layers from Transformer Engine; False: from Megatron's own local layers.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> GPTModel:
        args = get_args()
        config = config or core_transformer_config_from_args(args)
        layers, further_tokens = block_specs(
            config,
            transformer_engine=transformer_engine,
            normalization=args.normalization,
            vp_stage=vp_stage,
        )
        return GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            mtp_block_spec=further_tokens,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )

    return provide


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks of one pipeline that hold a copy of the embedding, for its gradient's all-reduce.

    The first stage, the last one if the output layer is tied, and the stages that predict further tokens
    (as Megatron's own pretrain_gpt.py says). Megatron's default knows of no further tokens: the copies on
    middle stages would drift away from the first one.
    """
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    if len(pipeline_ranks) == 1:
        return list(pipeline_ranks)
    tied = not args.untie_embeddings_and_output_weights
    further = get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args))
    return sorted({pipeline_ranks[0], *(pipeline_ranks[-1:] if tied else []), *further})
