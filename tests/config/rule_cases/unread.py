"""Cases of config/rules/unread.py."""

from __future__ import annotations

from muon_offload_cli.config.rules import MachineFacts, MegatronFacts
from tests.config.rule_cases.case import NATIVE, Case

CASES = [
    Case("unused-resume-step", "resume=/c/iter_0000002 resume.step=4", "resume=/c resume.step=4"),
    Case("unused-resume-step", "resume=2 checkpoint.directory=/c resume.step=4", "resume=/c resume.step=4"),
    Case(
        "unused-resume-step",
        "resume=auto checkpoint.directory=/c resume.step=4",
        "resume=auto checkpoint.directory=/c",
    ),
    Case("unused-resume-step", "resume.step=4"),
    Case(
        "unused-optimizer-keys", "optimizer=adam optimizer.muon_momentum=0.9", "optimizer.muon_momentum=0.9"
    ),
    Case(
        "layer-wise-unread",
        "optimizer.layer_wise=false",
        "optimizer.layer_wise=true",
    ),
    Case(
        "unused-offload-keys",
        "offload=none offload.directory=/x",
        "offload.directory=/x",
    ),
    Case("unused-offload-keys", "offload=none offload.chunk_mb=4", "offload=none"),
    Case("unused-offload-keys", "offload.engine=none offload.windows=4", "offload.engine=none"),
    Case("unused-offload-keys", "offload=host offload.host_memory_gb=4", "offload=host offload.windows=4"),
    Case("unused-offload-keys", "offload=mapped offload.verify=full", "offload.verify=full"),
    Case("unused-offload-keys", "offload=mapped offload.io_threads=4", "offload=mapped offload.directory=/x"),
    Case(
        "unused-offload-keys", "offload=mapped offload.staging_mb=64", "offload=mapped offload.fraction=0.5"
    ),
    Case(
        "unused-offload-keys",
        "offload=mapped offload.windows=4",
        "offload=disk offload.windows=4",
        NATIVE,
        NATIVE,
    ),
    Case(
        "unused-offload-keys",
        "offload=mapped offload.host_memory_gb=4",
        "offload=mapped offload.host_memory_gb=4",
        NATIVE,
        MachineFacts(megatron=MegatronFacts()),
    ),
    Case("unused-checkpoint-keys", "checkpoint.keep=2", "checkpoint.keep=2 checkpoint.directory=/c"),
    *(
        Case(
            "unused-adam-flags",
            f"megatron.args.{flag}",
            f"optimizer=adam megatron.args.{flag}",
        )
        for flag in (
            "exp_avg_dtype=bf16",
            "exp-avg-sq-dtype=fp8",
            "main_params_dtype=fp16",
            "optimizer_offload_fraction=0.5",
            "overlap_cpu_optimizer_d2h_h2d=true",
            "use_torch_optimizer_for_cpu_offload=true",
        )
    ),
    Case("unused-launcher-keys", "launcher.master_address=a", "launcher.master_address=a launcher.nodes=2"),
    Case("unused-checkpoint-keys", "checkpoint.interval=5", "checkpoint.interval=5 checkpoint.directory=/c"),
    Case("unused-checkpoint-keys", "checkpoint.optimizer=false", ""),
    Case(
        "unused-optimizer-keys", "optimizer=adam megatron.param_layout=false", "megatron.param_layout=false"
    ),
    Case("unused-expert-keys", "model=tiny_dense parallel.etp=1", "parallel.etp=1"),
    Case("unused-expert-keys", "model=tiny_dense model.moe.topk=3", "model.moe.topk=3"),
    Case("data-unused", "data.paths=[/a]"),
    Case("data-unused", "data.prefix=/a", "data=indexed data.prefix=/a"),
    Case("data-unused", "data.jsonl_key=body", "data=text data.jsonl_key=body"),
    Case("data-unused", "data=mock data.cache_directory=/c", "data.cache_directory=/c"),
]
