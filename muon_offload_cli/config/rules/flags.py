"""Further Megatron flags: each known to its parser, none that another key already gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from muon_offload_cli.config.keys import FREE_PREFIX, nearest
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import is_on
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem

# Flags of megatron/training/arguments.py that a key of ours gives; the value is that key.
OURS: dict[str, str] = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "sequence_parallel": "parallel.sequence_parallel",
    "train_iters": "train.steps",
    "train_samples": "train.steps",
    "seq_length": "train.sequence_length",
    "max_position_embeddings": "train.sequence_length",
    "micro_batch_size": "train.micro_batch",
    "global_batch_size": "train.global_batch",
    "seed": "train.seed",
    "optimizer": "optimizer.name",
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "lr_warmup_iters": "optimizer.lr_warmup_steps",
    "lr_decay_style": "optimizer.lr_decay_style",
    "weight_decay": "optimizer.weight_decay",
    "clip_grad": "optimizer.clip_grad",
    "use_distributed_optimizer": "optimizer.distributed",
    "use_layer_wise_distributed_optimizer": "optimizer.layer_wise",
    "use_layer_wise_param_layout": "megatron.param_layout",
    "muon_momentum": "optimizer.muon_momentum",
    "muon_nesterov": "optimizer.muon_nesterov",
    "muon_split_qkv": "optimizer.muon_split_qkv",
    "muon_no_split_qkv": "optimizer.muon_split_qkv",
    "muon_num_ns_steps": "optimizer.muon_num_ns_steps",
    "muon_coefficient_type": "optimizer.muon_coefficient_type",
    "muon_scale_mode": "optimizer.muon_scale_mode",
    "muon_tp_mode": "optimizer.muon_tp_mode",
    "adam_beta1": "optimizer.adam_beta1",
    "adam_beta2": "optimizer.adam_beta2",
    "adam_eps": "optimizer.adam_eps",
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "num_query_groups": "model.num_query_groups",
    "group_query_attention": "model.num_query_groups",
    "kv_channels": "model.kv_channels",
    "vocab_size": "model.vocab_size",
    "padded_vocab_size": "model.vocab_size",
    "normalization": "model.normalization",
    "norm_epsilon": "model.norm_epsilon",
    "swiglu": "model.swiglu",
    "rotary_base": "model.rotary_base",
    "rotary_percent": "model.rotary_percent",
    "qk_layernorm": "model.qk_layernorm",
    "untie_embeddings_and_output_weights": "model.tied_embeddings",
    "add_bias_linear": "model.add_bias_linear",
    "disable_bias_linear": "model.add_bias_linear",
    "init_method_std": "model.init_std",
    "num_experts": "model.moe.num_experts",
    "moe_router_topk": "model.moe.topk",
    "moe_ffn_hidden_size": "model.moe.ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "model.moe.shared_expert_ffn_hidden_size",
    "moe_layer_freq": "model.moe.layer_freq",
    "moe_aux_loss_coeff": "model.moe.aux_loss_coeff",
    "moe_router_load_balancing_type": "model.moe.load_balancing",
    "moe_grouped_gemm": "model.moe.grouped_gemm",
    "data_path": "data.prefix",
    "train_data_path": "data.prefix",
    "mock_data": "data.source",
    "save": "checkpoint.directory",
    "save_interval": "checkpoint.interval",
    "no_save_optim": "checkpoint.optimizer",
    "load": "resume.source",
}
_FLAG = re.compile(r"[a-z0-9][a-z0-9_]*", re.IGNORECASE)


@rule(name="flag-form", reason="A flag of Megatron has a plain name and a plain value.")
def flag_form(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse names that are no flag, and mappings as values."""
    for name, value in config.megatron.args.items():
        flag = name.replace("-", "_")
        if not _FLAG.fullmatch(flag):
            what = f"{FREE_PREFIX}{name[:80]} is no name of a flag: letters, digits, - and _ alone."
            yield Problem(
                what=what,
                fix=f"name a flag, as in {FREE_PREFIX}recompute_granularity=full",
                keys=(FREE_PREFIX + name,),
            )
        items = value if isinstance(value, list) else [value]
        if not all(item is None or isinstance(item, str | int | float | bool) for item in items):
            yield Problem(
                what=f"{FREE_PREFIX}{name[:80]}: a flag takes one value or a list of them, no mapping.",
                fix=f"{FREE_PREFIX}{name[:80]}=null",
                keys=(FREE_PREFIX + name,),
            )


@rule(name="flag-ours", reason="Two keys for one setting would contradict each other in silence.")
def flag_ours(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse flags that a key of ours gives."""
    for name, value in config.megatron.args.items():
        flag = name.replace("-", "_")
        if flag in OURS and is_on(value):
            key = OURS[flag]
            what = f"{FREE_PREFIX}{name}={value} is what the key {key} gives to Megatron."
            yield Problem(what=what, fix=f"{FREE_PREFIX}{name}=null", keys=(FREE_PREFIX + name, key))


@rule(
    name="flag-unknown",
    reason="Megatron's own parser would stop every rank at a misspelled flag.",
    machine=True,
)
def flag_unknown(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse flags that the parser of the Megatron at hand does not have."""
    if facts.megatron is None or facts.megatron.flags is None:
        return
    known, version = facts.megatron.flags, facts.megatron.version
    for name in config.megatron.args:
        flag = name.replace("-", "_")
        if flag in known or flag in OURS or not _FLAG.fullmatch(flag):
            continue
        near = nearest(flag, known, count=1)
        yield Problem(
            what=f"{FREE_PREFIX}{name[:80]}: Megatron{f' {version}' if version else ''} has no such flag."
            + (f" Did you mean {near[0]}?" if near else ""),
            fix=f"{FREE_PREFIX}{near[0]}=..." if near else "leave it out",
            keys=(FREE_PREFIX + name,),
        )
