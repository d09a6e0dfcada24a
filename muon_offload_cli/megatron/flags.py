"""From a resolved config to Megatron's command-line flags. Pure: nothing is imported from Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from typing import Any

from muon_offload_cli.config.model_schema import ModelConfig, MoeConfig
from muon_offload_cli.config.rules.family import is_muon
from muon_offload_cli.config.rules.flags import LAYOUT_OPT_IN, spelled
from muon_offload_cli.config.schema import Config, DataSource, Engine
from muon_offload_cli.config.vocabulary import uses_hf_tokenizer, vocabulary_size
from muon_offload_cli.units import round_up

CHUNKED_OFFLOAD = "--chunked-optimizer-state-offload"
"""Flag of Megatrons that bring a chunked optimizer-state offloader of their own."""


def megatron_flags(
    config: Config,
    *,
    device: str,
    transformer_engine: bool,
    data_prefix: str | None,
    known: Set[str] = frozenset(),
) -> list[str]:
    """Write the flags that make Megatron's own parser give the run that `config` describes.

    Args:
        config: Resolved and checked config.
        device: ``cpu`` or ``cuda``, as chosen on this machine.
        transformer_engine: Whether layers are built from Transformer Engine.
        data_prefix: Indexed dataset without suffix, or None for mock data.
        known: Option strings of the parser at hand, where it may be another than the released one's.

    Returns:
        Flags in a stable order; ``megatron.args`` come last, so that they win where Megatron lets them.
    """
    flags: list[str] = []
    groups = (
        _parallel(config),
        _training(config),
        _optimizer(config, known),
        _native_offloader(config, known),
        _model(config),
        _data(config, device, data_prefix),
        _device(config.model, device, transformer_engine),
        _checkpoint(config),
    )
    for group in groups:
        for name, value in group:
            flags += spelled(name, value)
    for name, value in config.megatron.args.items():
        flags += spelled(name, value)
    return flags


def _parallel(config: Config) -> Iterator[tuple[str, Any]]:
    parallel = config.parallel
    yield "tensor-model-parallel-size", parallel.tp
    yield "pipeline-model-parallel-size", parallel.pp
    yield "context-parallel-size", parallel.cp
    yield "expert-model-parallel-size", parallel.ep
    yield "expert-tensor-parallel-size", parallel.etp
    yield "sequence-parallel", parallel.sequence_parallel
    yield "decoder-first-pipeline-num-layers", parallel.decoder_first_pipeline_num_layers
    yield "decoder-last-pipeline-num-layers", parallel.decoder_last_pipeline_num_layers
    yield "num-virtual-stages-per-pipeline-rank", parallel.num_virtual_stages_per_pipeline_rank
    yield "pipeline-model-parallel-layout", parallel.pipeline_model_parallel_layout


def _training(config: Config) -> Iterator[tuple[str, Any]]:
    train = config.train
    yield "train-iters", train.steps
    yield "seq-length", train.sequence_length
    yield "max-position-embeddings", train.sequence_length
    yield "micro-batch-size", train.micro_batch
    yield "global-batch-size", train.global_batch
    yield "seed", train.seed
    yield "bf16", True
    yield "log-interval", 1
    yield "eval-interval", train.steps + 1
    yield "eval-iters", 0
    # The fused weight-gradient kernel comes with Apex or Transformer Engine.
    yield "no-gradient-accumulation-fusion", True


def _optimizer(config: Config, known: Set[str]) -> Iterator[tuple[str, Any]]:
    optimizer = config.optimizer
    yield "optimizer", optimizer.name
    yield (
        "use-distributed-optimizer",
        optimizer.distributed or (optimizer.layer_wise and is_muon(optimizer)),
    )
    yield "lr", optimizer.lr
    yield "min-lr", optimizer.min_lr
    yield "lr-warmup-iters", optimizer.lr_warmup_steps
    yield "lr-decay-style", optimizer.lr_decay_style
    yield "weight-decay", optimizer.weight_decay
    yield "clip-grad", optimizer.clip_grad
    yield "adam-beta1", optimizer.adam_beta1
    yield "adam-beta2", optimizer.adam_beta2
    yield "adam-eps", optimizer.adam_eps
    if is_muon(optimizer):
        yield "muon-momentum", optimizer.muon_momentum
        yield "muon-nesterov", optimizer.muon_nesterov
        yield "muon-no-split-qkv", not optimizer.muon_split_qkv
        yield "muon-num-ns-steps", optimizer.muon_num_ns_steps
        yield "muon-coefficient-type", optimizer.muon_coefficient_type
        yield "muon-scale-mode", optimizer.muon_scale_mode
        yield "muon-tp-mode", optimizer.muon_tp_mode
        if LAYOUT_OPT_IN in known:
            yield LAYOUT_OPT_IN, config.megatron.param_layout
        else:
            yield "no-use-layer-wise-param-layout", not config.megatron.param_layout


def _native_offloader(config: Config, known: Set[str]) -> Iterator[tuple[str, Any]]:
    if config.offload.engine is Engine.mapped and CHUNKED_OFFLOAD in known:
        yield CHUNKED_OFFLOAD, True
        # Whole MiB alone; rounded up, because 0 means one chunk of everything.
        yield "optimizer-state-offload-chunk-size-mb", math.ceil(config.offload.chunk_mb)
        yield "optimizer-state-offload-fraction", config.offload.fraction


def _model(config: Config) -> Iterator[tuple[str, Any]]:
    model = config.model
    yield "num-layers", model.num_layers
    yield "hidden-size", model.hidden_size
    yield "ffn-hidden-size", model.ffn_hidden_size
    yield "num-attention-heads", model.num_attention_heads
    if model.multi_latent_attention:
        yield from _latent_attention(model)
    elif model.num_query_groups is not None:
        yield "group-query-attention", True
        yield "num-query-groups", model.num_query_groups
    yield "kv-channels", model.kv_channels
    yield "attention-output-gate", model.attention_output_gate
    if model.experimental_attention_variant is not None:
        yield from _linear_attention(model)
    yield "make-vocab-size-divisible-by", model.make_vocab_size_divisible_by
    yield "normalization", model.normalization
    yield "norm-epsilon", model.norm_epsilon
    yield "apply-layernorm-1p", model.apply_layernorm_1p
    yield "swiglu", model.swiglu
    yield "position-embedding-type", "rope"
    yield "rotary-base", model.rotary_base
    yield "rotary-percent", model.rotary_percent
    yield "qk-layernorm", model.qk_layernorm
    yield "untie-embeddings-and-output-weights", not model.tied_embeddings
    yield "disable-bias-linear", not model.add_bias_linear
    yield "add-qkv-bias", model.add_qkv_bias
    yield "init-method-std", model.init_std
    yield "attention-dropout", 0.0
    yield "hidden-dropout", 0.0
    if model.mtp_num_layers:
        yield "mtp-num-layers", model.mtp_num_layers
        yield "mtp-loss-scaling-factor", model.mtp_loss_scaling_factor
    if model.moe.num_experts is not None:
        yield from _experts(model.moe)


def _latent_attention(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    yield "multi-latent-attention", True
    yield "q-lora-rank", model.q_lora_rank
    yield "kv-lora-rank", model.kv_lora_rank
    yield "qk-head-dim", model.qk_head_dim
    yield "qk-pos-emb-head-dim", model.qk_pos_emb_head_dim
    yield "v-head-dim", model.v_head_dim
    yield "rope-type", model.rope_type
    yield "rotary-scaling-factor", model.rotary_scaling_factor
    yield "mscale", model.mscale
    yield "mscale-all-dim", model.mscale_all_dim


def _linear_attention(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    yield "experimental-attention-variant", model.experimental_attention_variant
    yield "linear-attention-freq", model.linear_attention_freq
    yield "linear-num-key-heads", model.linear_num_key_heads
    yield "linear-num-value-heads", model.linear_num_value_heads
    yield "linear-key-head-dim", model.linear_key_head_dim
    yield "linear-value-head-dim", model.linear_value_head_dim
    yield "linear-conv-kernel-dim", model.linear_conv_kernel_dim


def _experts(moe: MoeConfig) -> Iterator[tuple[str, Any]]:
    yield "num-experts", moe.num_experts
    yield "moe-router-topk", moe.topk
    yield "moe-ffn-hidden-size", moe.ffn_hidden_size
    yield "moe-shared-expert-intermediate-size", moe.shared_expert_ffn_hidden_size
    yield "moe-shared-expert-gate", moe.shared_expert_gate
    yield "moe-layer-freq", moe.layer_freq
    yield "moe-aux-loss-coeff", moe.aux_loss_coeff
    yield "moe-router-load-balancing-type", moe.load_balancing
    yield "moe-router-score-function", moe.router_score_function
    yield "moe-router-pre-softmax", moe.router_pre_softmax
    if moe.router_enable_expert_bias:
        yield "moe-router-enable-expert-bias", True
        yield "moe-router-bias-update-rate", moe.router_bias_update_rate
    yield "moe-router-num-groups", moe.router_num_groups
    yield "moe-router-group-topk", moe.router_group_topk
    yield "moe-router-topk-scaling-factor", moe.router_topk_scaling_factor
    yield "moe-router-dtype", moe.router_dtype
    yield "moe-token-dispatcher-type", "alltoall"
    yield "moe-grouped-gemm", moe.grouped_gemm


def _data(config: Config, device: str, data_prefix: str | None) -> Iterator[tuple[str, Any]]:
    vocabulary = vocabulary_size(config)
    yield "vocab-size", vocabulary
    scripts_own = config.data.source is DataSource.script
    if device == "cpu" or not scripts_own:
        # A loader's workers pin memory, which needs a driver.
        yield "num-workers", 0
    if scripts_own:
        return
    if uses_hf_tokenizer(config):
        yield "tokenizer-type", "HuggingFaceTokenizer"
        yield "tokenizer-model", config.model.from_hf
        # Megatron would pad the tokenizer's size, and models have more rows than their tokenizers tokens.
        rows = config.model.make_vocab_size_divisible_by * config.parallel.tp
        yield "padded-vocab-size", round_up(vocabulary, rows)
    else:
        yield "tokenizer-type", "NullTokenizer"
    if data_prefix is None:
        yield "mock-data", True
    else:
        yield "data-path", [data_prefix]
    yield "split", "1,0,0"
    # Else a micro-batch with few tokens in its responses weighs as much as one with many.
    yield "calculate-per-token-loss", config.data.source is DataSource.chat
    yield "no-create-attention-mask-in-dataloader", True


def _device(model: ModelConfig, device: str, transformer_engine: bool) -> Iterator[tuple[str, Any]]:
    yield "distributed-backend", "gloo" if device == "cpu" else "nccl"
    if not transformer_engine:
        # These kernels come with Transformer Engine or Apex.
        yield "transformer-impl", "local"
        yield "no-persist-layer-norm", True
        yield "no-masked-softmax-fusion", True
    if not transformer_engine or (model.multi_latent_attention and model.rope_type == "rope"):
        # Transformer Engine's kernel, which takes latent attention with YaRN only.
        yield "no-rope-fusion", True
    if device == "cpu":
        # Compiled by torch for the GPU.
        yield "no-bias-swiglu-fusion", True
        yield "no-bias-gelu-fusion", True
        yield "no-bias-dropout-fusion", True


def _checkpoint(config: Config) -> Iterator[tuple[str, Any]]:
    checkpoint, resume = config.checkpoint, config.resume
    yield "ckpt-format", "torch_dist"
    if checkpoint.directory is not None:
        yield "save", checkpoint.directory
        yield "save-interval", checkpoint.interval or config.train.steps
        yield "no-save-optim", not checkpoint.optimizer
        # The format of the Adam sibling that another tensor-parallel size can load.
        yield "dist-ckpt-optim-fully-reshardable", True
        # SIGTERM saves at the end of the step and ends the run.
        yield "exit-signal-handler", True
    if resume.source is not None:
        yield "load", resume.source
        yield "ckpt-step", resume.step
        yield "exit-on-missing-checkpoint", True
        yield "finetune", resume.weights_only
        # The learning rate, its schedule and weight decay are those of this run's config.
        yield "override-opt-param-scheduler", True
