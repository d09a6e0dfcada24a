"""Cases of config/rules/exclusive.py."""

from __future__ import annotations

from muon_offload_cli.config.rules import MachineFacts, MegatronFacts
from tests.config.rule_cases.case import ARGS, NATIVE, Case

CASES = [
    Case(
        "adaptive-native",
        f"offload=none optimizer.name=adaptive_muon {ARGS}chunked_optimizer_state_offload=true",
        "offload=none optimizer.name=adaptive_muon",
    ),
    *(
        Case("unserved-readers", f"megatron.args.{flag}=true", f"megatron.args.{flag}=true offload=none")
        for flag in (
            "log-params-norm",
            "qk_clip",
            "optimizer_cuda_graph",
            "offload_optimizer_states",
            "chunked_optimizer_state_offload",
            "optimizer-cpu-offload",
            "use_megatron_fsdp",
            "use_torch_fsdp2",
            "use_precision_aware_optimizer",
            "fp8_param_gather",
            "fp4_param_gather",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "rl_offload_optimizer_during_inference",
        )
    ),
    *(
        Case(
            "not-for-muon",
            f"offload=none megatron.args.{flag}=true",
            f"offload=none optimizer=adam megatron.args.{flag}=true",
        )
        for flag in (
            "optimizer_cpu_offload",
            "use_precision_aware_optimizer",
            "use-megatron-fsdp",
            "use_torch_fsdp2",
        )
    ),
    *(
        Case(
            "native-layout",
            f"offload=none megatron.args.{flag}=true",
            f"offload=none megatron.args.{flag}=true megatron.param_layout=false",
        )
        for flag in ("offload_optimizer_states", "chunked-optimizer-state-offload")
    ),
    Case(
        "adaptive-native",
        "offload=mapped optimizer.name=adaptive_muon",
        "offload=mapped optimizer.name=adaptive_muon",
        NATIVE,
    ),
    Case(
        "native-layout",
        "offload=mapped",
        "offload=mapped megatron.param_layout=false",
        NATIVE,
        NATIVE,
    ),
    Case("native-layout", "offload=mapped", "offload=mapped", NATIVE, MachineFacts(megatron=MegatronFacts())),
    Case("native-layout", "offload=mapped", "offload=disk", NATIVE, NATIVE),
    Case(
        "adaptive-native",
        "offload=mapped optimizer.name=adaptive_muon optimizer.layer_wise=true",
        "offload=disk optimizer.name=adaptive_muon optimizer.layer_wise=true",
        NATIVE,
        NATIVE,
    ),
    *(
        Case(
            "checkpoint-format",
            f"checkpoint.directory=/c megatron.args.ckpt_format={bad}",
            "checkpoint.directory=/c megatron.args.ckpt_format=torch_dist",
        )
        for bad in ("torch", "torch_dcp", "fsdp_dtensor")
    ),
    Case(
        "checkpoint-format",
        "offload=none megatron.args.ckpt-format=fsdp_dtensor",
        "offload=none megatron.args.ckpt_format=torch",
    ),
    Case(
        "full-iteration-graph",
        "megatron.args.cuda_graph_modules=[full_iteration]",
        "megatron.args.cuda_graph_modules=[attn]",
    ),
    Case(
        "full-iteration-graph",
        "megatron.args.cuda_graph_scope=full_iteration",
        "megatron.args.cuda_graph_scope=attn",
    ),
    Case(
        "full-iteration-graph",
        "megatron.args.cuda-graph-impl=full_iteration",
        "megatron.args.cuda_graph_impl=local",
    ),
    Case("fp16", "megatron.args.fp16=true", "megatron.args.fp16=false"),
    Case("param-gather", "megatron.args.overlap_param_gather=true"),
    Case("optimizer-instances", "megatron.args.num-distributed-optimizer-instances=2"),
]
