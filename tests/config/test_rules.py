"""Every rule passes where it should, finds what it should, and its fix makes it pass."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from muon_offload_cli.config.compose import Composition, compose
from muon_offload_cli.config.keys import is_known
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.rules import (
    DirectoryFacts,
    FileFacts,
    MachineFacts,
    MegatronFacts,
    ParameterFacts,
    PlannedFacts,
    PretrainedFacts,
    Rule,
    all_rules,
    check,
    refuses,
)
from muon_offload_cli.config.rules.directory import FOLDERS
from muon_offload_cli.config.rules.flags import OURS
from muon_offload_cli.config.schema import MegatronConfig
from muon_offload_cli.errors import Level, Problem
from muon_offload_cli.megatron.flags import megatron_flags

NOTHING_KNOWN = MachineFacts()
# Flags that every run is given and that megatron.args may replace, since no key speaks of them.
FIXED_FLAGS = {
    "attention_dropout",
    "bf16",
    "ckpt_format",
    "distributed_backend",
    "eval_interval",
    "eval_iters",
    "hidden_dropout",
    "log_interval",
    "moe_token_dispatcher_type",
    "no_bias_dropout_fusion",
    "no_bias_gelu_fusion",
    "no_bias_swiglu_fusion",
    "no_create_attention_mask_in_dataloader",
    "no_gradient_accumulation_fusion",
    "no_masked_softmax_fusion",
    "no_persist_layer_norm",
    "no_rope_fusion",
    "num_workers",
    "position_embedding_type",
    "split",
    "tokenizer_type",
    "transformer_impl",
}
NATIVE = MachineFacts(megatron=MegatronFacts(version="0.20", root="/checkout", chunked_offloader=True))
CHANGED = MachineFacts(
    megatron=MegatronFacts(
        version="0.20", root="/checkout", chunked_offloader=True, offloader_lacks=("Offloader.step()",)
    )
)
ARGS = "megatron.args."
SCRIPT = "megatron.entrypoint=/my/pretrain.py"
UNREADABLE = (
    FileFacts(num_bytes=None),
    FileFacts(num_bytes=0),
    FileFacts(num_bytes=9, readable=False),
    FileFacts(num_bytes=None, is_folder=True),
)
FIRST = f"{ARGS}decoder_first_pipeline_num_layers"
LAST = f"{ARGS}decoder_last_pipeline_num_layers"
VIRTUAL = f"{ARGS}num_virtual_stages_per_pipeline_rank"
LAYERS_PER_VIRTUAL = f"{ARGS}num_layers_per_virtual_pipeline_stage"
ONLY_QUINTIC_5 = MachineFacts(megatron=MegatronFacts(newton_schulz={"quintic": frozenset({5, 10})}))
NS_WITHOUT_QUINTIC = MachineFacts(
    megatron=MegatronFacts(newton_schulz={"quintic": frozenset(), "cans": frozenset({5})})
)
TWO_HUNDRED_GB_OF_HOST = MachineFacts(planned=PlannedFacts(host_bytes=200 * 2**30))
LARGE_RINGS = MachineFacts(
    planned=PlannedFacts(host_bytes=200 * 2**30, staging_bytes=200 * 2**30), headroom_bytes=10**11
)
HF = f"model=from_hf model.from_hf={Path(__file__).parent / 'hf' / 'qwen3_4b'}"


CHAT = "data.source=chat data.paths=[/d/a.jsonl]"


def pretrained(**changes: Any) -> MachineFacts:
    return MachineFacts(pretrained=PretrainedFacts(**changes))


WITHOUT_WEIGHTS = pretrained(weight_files=0)
TWO_GPUS = MachineFacts(cuda_available=True, num_gpus=2)
ONE_GB_OF_HOST = MachineFacts(planned=PlannedFacts(host_bytes=2**30))
LARGE_PARAMETER = MachineFacts(
    planned=PlannedFacts(largest_parameter=ParameterFacts(name="w", shape=(512, 512), state_bytes=2 * 2**20))
)


def on_disks(*each: dict[str, object]) -> MachineFacts:
    directories = []
    for number, changes in enumerate(each):
        root = Path(f"/d{number or ''}")
        values: dict[str, object] = {
            "path": root / "s",
            "nearest": root,
            "exists": False,
            "mount_point": root,
            "device": number,
        }
        directories.append(DirectoryFacts(**(values | changes)))  # type: ignore[arg-type]
    return MachineFacts(
        directories=tuple(directories), planned=PlannedFacts(directory_bytes=(1000,) * len(each))
    )


def on_disk(**changes: object) -> MachineFacts:
    return on_disks(changes)


def in_folders(*keys: str, **changes: Any) -> MachineFacts:
    known = DirectoryFacts(path=Path("/f/x"), nearest=Path("/f"), **changes)
    return MachineFacts(
        folders=dict.fromkeys(keys or FOLDERS, known), planned=PlannedFacts(checkpoint_bytes=1000)
    )


TWO = "offload.directory=[/d/s,/d1/s]"


@dataclass
class Case:
    rule: str
    bad: str
    good: str = ""
    bad_facts: MachineFacts = field(default=NOTHING_KNOWN)
    good_facts: MachineFacts = field(default=NOTHING_KNOWN)
    level: Level = Level.ERROR


CASES = [
    Case("optimizer-family", "optimizer.name=soap"),
    Case(
        "adaptive-muon",
        "optimizer.name=adaptive_muon optimizer.layer_wise=true",
        "optimizer.name=adaptive_muon optimizer.layer_wise=true",
        MachineFacts(megatron=MegatronFacts(version="0.19.2", adaptive_muon="no attribute 'scale_mode'")),
        MachineFacts(megatron=MegatronFacts(version="0.19.2", adaptive_muon="")),
    ),
    Case(
        "plain-muon", "optimizer.name=adaptive_muon", "optimizer.name=adaptive_muon optimizer.layer_wise=true"
    ),
    Case(
        "adaptive-native",
        f"offload=none optimizer.name=adaptive_muon {ARGS}chunked_optimizer_state_offload=true",
        "offload=none optimizer.name=adaptive_muon",
    ),
    Case("optimizer-family", "optimizer.name=adm", "optimizer=adam"),
    Case("plain-muon", "optimizer.name=muon", "optimizer.name=muon optimizer.layer_wise=true"),
    Case("plain-muon", "optimizer.name=muon optimizer.distributed=true", "optimizer=muon"),
    Case("muon-distributed", "optimizer.distributed=true"),
    Case("adam-distributed", "optimizer.name=adam", "optimizer=adam"),
    Case("adam-layer-wise", "optimizer=adam optimizer.layer_wise=true", "optimizer=adam"),
    Case("adam-offload", "optimizer=adam", "optimizer=adam offload=none"),
    Case(
        "unused-optimizer-keys", "optimizer=adam optimizer.muon_momentum=0.9", "optimizer.muon_momentum=0.9"
    ),
    Case("muon-choices", "optimizer.muon_coefficient_type=quartic", "optimizer.muon_coefficient_type=cans"),
    Case("muon-choices", "optimizer.lr_decay_style=cosinus"),
    Case(
        "layer-wise-unread",
        "optimizer.layer_wise=false",
        "optimizer.layer_wise=true",
    ),
    Case("number-range", "train.steps=0"),
    Case("number-range", "optimizer.lr=nan"),
    Case("number-range", "optimizer.lr=inf"),
    Case("number-range", "optimizer.muon_momentum=1"),
    Case("number-range", "optimizer.muon_num_ns_steps=0"),
    Case("number-range", "launcher.master_port=0"),
    Case("number-range", "model.hidden_size=99999999999"),
    *(
        Case("empty-path", f"{key}=")
        for key in ("run.directory", "checkpoint.directory", "data.cache_directory", "megatron.path")
    ),
    Case("node-rank", "launcher.nodes=2 launcher.node_rank=2", "launcher.nodes=2 launcher.node_rank=1"),
    Case(
        "meeting-point",
        "launcher.nodes=2 launcher.master_address=a",
        "launcher.nodes=2 launcher.master_address=a launcher.master_port=1234",
    ),
    Case("chunk-size", "offload.chunk_mb=-1"),
    Case("chunk-size", "offload.chunk_mb=inf"),
    Case("chunking-off", "offload.chunk_mb=0", "offload.chunk_mb=0 offload=none", level=Level.WARNING),
    Case("fraction-range", "offload.fraction=1.5", "offload.fraction=0.5"),
    Case("fraction-range", "offload.fraction=nan"),
    Case("fraction-zero", "offload.fraction=0", "offload.fraction=0 offload=none"),
    Case("windows", "offload.windows=1", level=Level.WARNING),
    Case("host-memory", "offload.host_memory_gb=lots", "offload.host_memory_gb=auto"),
    Case("host-memory", "offload.host_memory_gb=-1", "offload.host_memory_gb=1.5"),
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
    Case("newton-schulz", "", "", NS_WITHOUT_QUINTIC, ONLY_QUINTIC_5),
    Case("newton-schulz", "optimizer.muon_num_ns_steps=4", "", ONLY_QUINTIC_5, ONLY_QUINTIC_5),
    Case(
        "newton-schulz",
        "optimizer.muon_num_ns_steps=6",
        "optimizer=adam optimizer.muon_num_ns_steps=6",
        ONLY_QUINTIC_5,
        ONLY_QUINTIC_5,
    ),
    Case("learning-rate", "optimizer.min_lr=0.1", "optimizer.min_lr=0.001"),
    Case("learning-rate", "optimizer.lr_warmup_steps=30", "optimizer.lr_warmup_steps=29"),
    Case(
        "chunk-parameter",
        "offload.chunk_mb=1.5",
        "offload=none",
        LARGE_PARAMETER,
        LARGE_PARAMETER,
        level=Level.WARNING,
    ),
    Case(
        "chunk-parameter",
        "offload.chunk_mb=1.5",
        "offload.chunk_mb=3",
        LARGE_PARAMETER,
        LARGE_PARAMETER,
        level=Level.WARNING,
    ),
    Case(
        "host-fits",
        "offload=host cluster=h200_x1",
        "offload=host cluster=gb300_x4",
        TWO_HUNDRED_GB_OF_HOST,
        ONE_GB_OF_HOST,
    ),
    Case(
        "host-fits",
        "offload.host_memory_gb=200 cluster=h200_x1",
        "offload.host_memory_gb=200",
        TWO_HUNDRED_GB_OF_HOST,
        ONE_GB_OF_HOST,
    ),
    Case(
        "host-headroom",
        "offload=host",
        "offload=host",
        replace(TWO_HUNDRED_GB_OF_HOST, headroom_bytes=100 * 10**9),
        replace(ONE_GB_OF_HOST, headroom_bytes=100 * 10**9),
    ),
    Case(
        "host-headroom",
        "offload.host_memory_gb=200",
        "offload.host_memory_gb=200",
        replace(TWO_HUNDRED_GB_OF_HOST, headroom_bytes=16 * 10**9, memory_limit_bytes=16 * 2**30),
        replace(ONE_GB_OF_HOST, headroom_bytes=16 * 10**9, memory_limit_bytes=16 * 2**30),
    ),
    Case("host-headroom", "offload.staging_mb=300000", "", LARGE_RINGS, ONE_GB_OF_HOST),
    Case("host-fits", "offload.staging_mb=300000 cluster=h200_x1", "", LARGE_RINGS, ONE_GB_OF_HOST),
    Case("staging", "offload.staging_mb=0.5", "offload.staging_mb=1"),
    Case("staging", "offload.chunk_mb=64 offload.staging_mb=15", "offload.chunk_mb=64 offload.staging_mb=16"),
    Case("staging", "offload.staging_mb=0.5", "offload.staging_mb=0.5 offload=mapped"),
    Case("number-range", "offload.windows=0"),
    Case("number-range", "offload.io_threads=0"),
    Case("number-range", "offload.staging_mb=-1"),
    Case("number-range", "offload.staging_mb=nan"),
    Case("number-range", "optimizer.lr=-1"),
    Case("number-range", "optimizer.clip_grad=-inf"),
    Case("number-range", "optimizer.clip_grad=nan"),
    Case("number-range", "optimizer.weight_decay=inf"),
    Case("number-range", f"model.num_layers={'9' * 400}"),
    Case("chunk-size", "offload.chunk_mb=1e300"),
    Case("host-memory", "offload.host_memory_gb=nan", "offload.host_memory_gb=0"),
    Case("host-memory", "offload.host_memory_gb=1e300", "offload.host_memory_gb=64"),
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
    Case("native-contract", "offload=mapped", "offload=disk", CHANGED, CHANGED),
    Case(
        "adaptive-native",
        "offload=mapped optimizer.name=adaptive_muon optimizer.layer_wise=true",
        "offload=disk optimizer.name=adaptive_muon optimizer.layer_wise=true",
        NATIVE,
        NATIVE,
    ),
    Case("native-contract", "offload=mapped", "offload=mapped", CHANGED, NATIVE),
    Case(
        "native-offloader",
        "offload=none megatron.args.chunked_optimizer_state_offload=true",
        "offload=none megatron.args.chunked_optimizer_state_offload=true",
        MachineFacts(megatron=MegatronFacts(version="0.19.2")),
        MachineFacts(megatron=MegatronFacts(version="0.20", chunked_offloader=True)),
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
        "checkpoint-flags",
        "checkpoint.directory=/c megatron.args.async_save=true",
        "megatron.args.async_save=true",
    ),
    Case(
        "checkpoint-numbers",
        "checkpoint.directory=/c checkpoint.keep=0",
        "checkpoint.directory=/c checkpoint.keep=1",
    ),
    Case("checkpoint-numbers", "resume=/c resume.step=0", "resume=/c resume.step=1"),
    Case(
        "experts-saved-twice",
        "checkpoint.directory=/c parallel.ep=1 parallel.etp=1",
        "checkpoint.directory=/c parallel.ep=1 parallel.etp=2",
    ),
    Case("unused-checkpoint-keys", "checkpoint.keep=2", "checkpoint.keep=2 checkpoint.directory=/c"),
    Case("checkpoint-nowhere", "resume=auto", "resume=auto checkpoint.directory=/c"),
    Case("checkpoint-nowhere", "resume=4", "resume=/c"),
    Case("weights-only", "resume.weights_only=true", "resume.weights_only=true resume=/c"),
    Case(
        "weights-only",
        "resume.weights_only=true resume=auto checkpoint.directory=/c",
        "resume.weights_only=true resume=/d checkpoint.directory=/c",
    ),
    Case("weights-only", "resume.weights_only=true resume=/c checkpoint.directory=/c"),
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
    Case("flag-form", "'megatron.args.a={b: 1}'", "megatron.args.a=[1,2]"),
    Case("flag-form", "megatron.args.a.b=1"),
    Case(
        "flag-ours", "megatron.args.tensor-model-parallel-size=2", "megatron.args.recompute_granularity=full"
    ),
    Case("flag-ours", "megatron.args.lr=1"),
    Case(
        "flag-unknown",
        "megatron.args.recompute_granulity=full",
        "megatron.args.recompute-granularity=full",
        MachineFacts(megatron=MegatronFacts(flags=frozenset({"recompute_granularity"}))),
        MachineFacts(megatron=MegatronFacts(flags=frozenset({"recompute_granularity"}))),
    ),
    Case(
        "flag-unknown",
        f"megatron.args.my_flag=1 {SCRIPT}",
        f"megatron.args.recompute-granularity=full {SCRIPT}",
        MachineFacts(megatron=MegatronFacts(flags=frozenset({"recompute_granularity"}))),
        MachineFacts(megatron=MegatronFacts(flags=frozenset({"recompute_granularity"}))),
        Level.NOTE,
    ),
    Case("flag-ours", "megatron.args.data_path=/a", f"{SCRIPT} data=script megatron.args.data_path=/a"),
    Case("flag-ours", f"{SCRIPT} data=script megatron.args.train_iters=3", SCRIPT),
    *(
        Case(
            "entrypoint-file",
            SCRIPT,
            SCRIPT,
            MachineFacts(files={"/my/pretrain.py": bad}),
            MachineFacts(files={"/my/pretrain.py": FileFacts(num_bytes=5)}),
        )
        for bad in UNREADABLE
    ),
    Case(
        "entrypoint-source",
        SCRIPT,
        SCRIPT,
        MachineFacts(
            files={"/my/pretrain.py": FileFacts(num_bytes=5, not_python="is not Python: line 1: x")}
        ),
        MachineFacts(files={"/my/pretrain.py": FileFacts(num_bytes=5)}),
    ),
    Case(
        "entrypoint-checkout",
        SCRIPT,
        f"{SCRIPT} megatron.path=/my",
        MachineFacts(megatron_beside_script="/my"),
        MachineFacts(megatron_beside_script="/my"),
    ),
    Case(
        "entrypoint-checkout",
        f"{SCRIPT} megatron.path=/your",
        SCRIPT,
        MachineFacts(megatron_beside_script="/my"),
    ),
    Case("script-words", "megatron.script_args=[--a]", f"{SCRIPT} megatron.script_args=[--a,3]"),
    Case(
        "script-words",
        f"{SCRIPT} megatron.script_args=[--num-layers,3]",
        f"{SCRIPT} megatron.script_args=[lr]",
    ),
    Case("script-words", f"{SCRIPT} 'megatron.script_args=[\"--train_iters=9\"]'"),
    Case("data-script", "data=script", f"data=script {SCRIPT}"),
    Case("world-size", "launcher.ranks_per_node=3", "launcher.ranks_per_node=6"),
    Case("world-size", "launcher.nodes=3 launcher.ranks_per_node=1 parallel.tp=2"),
    Case("expert-world-size", "launcher.ranks_per_node=6", "launcher.ranks_per_node=8"),
    Case("expert-world-size", "parallel.ep=4", "parallel.ep=4 parallel.etp=1"),
    Case("expert-world-size", "launcher.ranks_per_node=1"),
    Case("experts-ep", "model.moe.num_experts=9", "model.moe.num_experts=10"),
    Case("experts-ep", "model=tiny_dense", "model=tiny_dense parallel=tp2"),
    Case("heads-tp", "parallel.tp=3", "parallel.tp=4"),
    Case("heads-tp", "parallel.tp=8"),
    Case("ffn-tp", "model.ffn_hidden_size=513"),
    Case("ffn-tp", "model.moe.ffn_hidden_size=255", "model.moe.ffn_hidden_size=255 parallel.etp=1"),
    Case("layers-pp", "parallel.pp=3", "parallel.pp=3 megatron.args.decoder_first_pipeline_num_layers=2"),
    Case(
        "layers-pp",
        "parallel.pp=3",
        f"parallel.pp=3 {ARGS}account_for_embedding_in_pipeline_split=true "
        f"{ARGS}account_for_loss_in_pipeline_split=true",
    ),
    Case("layers-pp", f"parallel.pp=2 {ARGS}account_for_loss_in_pipeline_split=true", "parallel.pp=2"),
    *(
        Case("pipeline-counts", f"{ARGS}{flag}={bad}", f"{ARGS}{flag}=1")
        for flag, bad in (
            ("decoder_first_pipeline_num_layers", "0"),
            ("decoder-last-pipeline-num-layers", "-1"),
            ("num_virtual_stages_per_pipeline_rank", "two"),
            ("num_layers_per_virtual_pipeline_stage", "1.5"),
        )
    ),
    Case(
        "uneven-pipeline",
        f"parallel.pp=2 {FIRST}=4",
        f"parallel.pp=2 {FIRST}=3",
    ),
    Case(
        "uneven-pipeline",
        f"parallel.pp=3 {LAST}=1",
        f"parallel.pp=3 {LAST}=2",
    ),
    Case("uneven-pipeline", f"{FIRST}=1", ""),
    Case(
        "uneven-pipeline",
        f"parallel.pp=2 {FIRST}=1 {LAST}=1",
        f"parallel.pp=2 {FIRST}=1 {LAST}=3",
    ),
    Case(
        "uneven-pipeline",
        f"parallel.pp=2 {FIRST}=1 {ARGS}account_for_loss_in_pipeline_split=true",
        f"parallel.pp=2 {FIRST}=1",
    ),
    Case(
        "pipeline-layout",
        f"parallel.pp=2 '{ARGS}pipeline_model_parallel_layout=\"Et|tt|tL\"'",
        f"parallel.pp=2 '{ARGS}pipeline_model_parallel_layout=\"Ett|ttL\"'",
    ),
    Case(
        "pipeline-layout",
        f"'{ARGS}pipeline_model_parallel_layout=\"Ett|ttL\"' {VIRTUAL}=2",
        "",
    ),
    Case(
        "virtual-pipeline",
        f"{VIRTUAL}=2",
        f"parallel.pp=2 {VIRTUAL}=2",
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {VIRTUAL}=3",
        f"parallel.pp=2 {LAYERS_PER_VIRTUAL}=1",
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {VIRTUAL}=2 {LAYERS_PER_VIRTUAL}=1",
        "",
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {VIRTUAL}=2 {ARGS}no_overlap_p2p_communication=true",
        f"parallel.pp=4 {VIRTUAL}=1 {ARGS}no_overlap_p2p_communication=true",
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {LAYERS_PER_VIRTUAL}=1 {FIRST}=1",
        f"parallel.pp=2 {VIRTUAL}=1 {FIRST}=1",
    ),
    Case(
        "virtual-pipeline",
        "parallel.pp=2 parallel.num_virtual_stages_per_pipeline_rank=3",
        "parallel.pp=2 parallel.num_virtual_stages_per_pipeline_rank=2",
    ),
    Case(
        "uneven-pipeline",
        "parallel.pp=2 parallel.decoder_first_pipeline_num_layers=4",
        "parallel.pp=2 parallel.decoder_first_pipeline_num_layers=1",
    ),
    *(
        Case("pipeline-layout", f"parallel.pp=2 '{ARGS}pipeline_model_parallel_layout=\"{bad}\"'")
        for bad in ("Ett|ttx", "Ett|tL", "Et*3|(t|)*1L", "E(t)*99999999|tL", f"Et*{'9' * 5000}|L")
    ),
    Case(
        "virtual-pipeline",
        f"parallel.pp=2 {VIRTUAL}=2 {FIRST}=1",
        f"parallel.pp=2 {VIRTUAL}=2 {FIRST}=2",
    ),
    Case(
        "virtual-batches",
        f"parallel.pp=2 train.global_batch=2 {VIRTUAL}=2",
        f"parallel.pp=2 train.global_batch=4 {VIRTUAL}=2",
    ),
    Case(
        "tensor-parallel-nodes",
        "launcher.nodes=2 launcher.ranks_per_node=2 parallel.tp=4",
        "launcher.nodes=2 launcher.ranks_per_node=4 parallel.tp=4",
        level=Level.WARNING,
    ),
    Case("idle-gpus", "cluster=h200_x8 launcher.nodes=2", "cluster=h200_x8", level=Level.NOTE),
    Case(
        "vocabulary-padding",
        "model.make_vocab_size_divisible_by=0",
        "model.make_vocab_size_divisible_by=64",
    ),
    Case(
        "vocabulary-padding",
        f"{ARGS}no_pad_vocab_size=true",
        f"{ARGS}no_pad_vocab_size=true model.vocab_size=258",
    ),
    Case(
        "vocabulary-padding",
        f"{ARGS}disable-pad-vocab-size=true model.vocab_size=259",
        f"{ARGS}disable-pad-vocab-size=true model.vocab_size=259 parallel.tp=1",
    ),
    Case("global-batch", "train.global_batch=6", "train.global_batch=8"),
    Case("sequence-parallel", "parallel.tp=1", "parallel.tp=1 parallel.sequence_parallel=false"),
    Case("sequence-parallel", "train.sequence_length=127"),
    Case("moe-sequence-parallel", "parallel.sequence_parallel=false"),
    Case("sequence-cp", "parallel.cp=2 train.sequence_length=130", "parallel.cp=2"),
    Case("gpus-per-node", "cluster=h200_x1", "cluster=gb300_x4"),
    Case("head-size", "model.hidden_size=100", "model.hidden_size=100 model.kv_channels=32"),
    Case("query-groups", "model.num_query_groups=3", "model.num_query_groups=2"),
    Case("top-k", "model.moe.topk=300"),
    Case("unused-expert-keys", "model=tiny_dense model.moe.topk=3", "model.moe.topk=3"),
    Case(
        "uneven-pipeline",
        "model.num_layers=5 parallel.pp=3 parallel.decoder_first_pipeline_num_layers=2",
        "model.num_layers=5 parallel.pp=3 parallel.decoder_first_pipeline_num_layers=1",
    ),
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
    Case("normalization", "model.normalization=rms"),
    Case("head-width", "model.kv_channels=48", "model.kv_channels=32", level=Level.WARNING),
    Case("head-width", "model.kv_channels=48 model.hidden_size=100", "", level=Level.WARNING),
    Case("rotary-size", "model.kv_channels=33", "model.kv_channels=34"),
    Case("rotary-size", "model.rotary_percent=0.01", "model.rotary_percent=0.5"),
    Case("load-balancing", "model.moe.load_balancing=aux", "model.moe.load_balancing=sinkhorn"),
    Case(
        "load-balancing",
        "model.moe.load_balancing=none model.moe.aux_loss_coeff=0.1",
        "model.moe.load_balancing=none",
    ),
    Case("expert-layers", "model.moe.layer_freq=often", "model.moe.layer_freq=2"),
    Case("expert-layers", "model.moe.layer_freq=0"),
    Case("expert-layers", "'model.moe.layer_freq=\"([0]+[1]*2)\"'", "'model.moe.layer_freq=\"([0]+[1]*3)\"'"),
    Case("expert-layers", "'model.moe.layer_freq=\"[1]*10**9\"'", "'model.moe.layer_freq=\"([1]+[0]*1)*2\"'"),
    Case("expert-layers", "'model.moe.layer_freq=\"[2]*4\"'", "'model.moe.layer_freq=\"[1,0,1,0]\"'"),
    Case("grouped-gemm", "device=cpu model.moe.grouped_gemm=true", "device=cuda model.moe.grouped_gemm=true"),
    Case("data-named", "data=text", "data=text data.paths=[/a]"),
    Case("data-named", "data=chat", "data=chat data.paths=[/a]"),
    Case("data-named", "data=indexed", "data=indexed data.prefix=/a"),
    Case("data-unused", "data.paths=[/a]"),
    Case("data-unused", "data.prefix=/a", "data=indexed data.prefix=/a"),
    Case("data-unused", "data.jsonl_key=body", "data=text data.jsonl_key=body"),
    Case("data-unused", "data=mock data.cache_directory=/c", "data.cache_directory=/c"),
    Case("cache-absolute", "data.cache_directory=c", "'data.cache_directory=\"~/c\"'"),
    *(
        Case("data-flags", f"{ARGS}{flag}=true", f"{ARGS}{flag}=false")
        for flag in (
            "sft",
            "fim-data",
            "hybrid_context_parallel",
            "dataloader_inter_document_masking",
            "overlap_moe_expert_parallel_comm",
        )
    ),
    Case("vocabulary", "data=indexed data.prefix=/a", "data=indexed data.prefix=/a model.vocab_size=99"),
    Case("data-flags", f"{ARGS}sft=true", f"{ARGS}sft=true {SCRIPT}"),
    Case("vocabulary", f"data=script {SCRIPT}", f"data=script {SCRIPT} model.vocab_size=99"),
    Case("vocabulary", "model.vocab_size=256", "model.vocab_size=257"),
    *(
        Case(
            "data-files",
            "data=text data.paths=[/a]",
            "data=text data.paths=[/a]",
            MachineFacts(files={"/a": bad}),
            MachineFacts(files={"/a": FileFacts(num_bytes=5)}),
        )
        for bad in UNREADABLE
    ),
    Case(
        "data-files",
        "data=indexed data.prefix=/a",
        bad_facts=MachineFacts(files={"/a.bin": FileFacts(num_bytes=3), "/a.idx": FileFacts(num_bytes=None)}),
    ),
    Case(
        "data-content",
        "data=chat data.paths=[/a]",
        "data=chat data.paths=[/a]",
        MachineFacts(data_problems=(Problem(what="/a line 2 is not JSON."),)),
        # Told once, by data-files.
        MachineFacts(
            files={"/a": FileFacts(num_bytes=0)}, data_problems=(Problem(what="data.paths: /a is empty."),)
        ),
    ),
    Case("mock-data", "data=mock", level=Level.NOTE),
    Case("found", "", bad_facts=MachineFacts(problems=(Problem(what="megatron-core is missing."),))),
    Case(
        "muon-installed",
        "",
        "optimizer=adam",
        MachineFacts(muon_problems=(Problem(what="emerging-optimizers is a stub."),)),
        MachineFacts(muon_problems=(Problem(what="emerging-optimizers is a stub."),)),
    ),
    Case(
        "megatron-path",
        "megatron.path=/x",
        bad_facts=MachineFacts(megatron_missing=("megatron/core", "megatron/training")),
    ),
    Case(
        "cuda",
        "device=cuda",
        "device=auto",
        MachineFacts(cuda_available=False),
        MachineFacts(cuda_available=False),
    ),
    Case(
        "gpus-here",
        "",
        "launcher.ranks_per_node=2",
        TWO_GPUS,
        TWO_GPUS,
    ),
    Case(
        "gpus-here",
        "",
        "device=cpu",
        replace(TWO_GPUS, layouts_told="What fits here: ...", layouts_fix="launcher.ranks_per_node=2"),
        TWO_GPUS,
    ),
    Case("gpus-here", "", "device=cpu", replace(TWO_GPUS, layouts_told="Nothing fits."), TWO_GPUS),
    Case("hf-weights", HF, f"{HF} model.hf_weights=false", WITHOUT_WEIGHTS, WITHOUT_WEIGHTS),
    Case("hf-weights", HF, HF, pretrained(missing=("a", "b", "c", "d")), pretrained()),
    Case(
        "hf-weights", HF, f"{HF} model.hf_weights=false", pretrained(bridge=False), pretrained(bridge=False)
    ),
    Case("hf-tokenizer", f"{HF} data=mock", HF, pretrained(tokenizer=False), pretrained(tokenizer=False)),
    Case("hf-tokenizer", f"{HF} data=mock", "data=mock", pretrained(transformers=False), pretrained()),
    Case("hf-tokenizer", f"{HF} {CHAT}", f"{HF} data=stdlib", pretrained(tokenizer=False), pretrained()),
    Case("hf-bytes", HF, f"{HF} data=mock", level=Level.WARNING),
    Case("hf-bytes", f"{HF} {CHAT} model.hf_tokenizer=false", f"{HF} {CHAT}", level=Level.WARNING),
    Case("hf-bytes", HF, f"{HF} model.hf_weights=false", level=Level.WARNING),
    Case("unused-hf-keys", "model.hf_tokenizer=false", f"{HF} model.hf_tokenizer=false"),
    Case("directory-absolute", "offload.directory=a", "offload.directory=/a"),
    Case(
        "directory-absolute",
        "offload.directory=a",
        "offload.directory=a offload=host",
        MachineFacts(working_directory=Path("/home/u")),
    ),
    Case("directory-absolute", "offload.directory="),
    Case("directory-absolute", "'offload.directory=\"~/x\"'"),
    Case("directory-folder", "", "", on_disk(is_folder=False), on_disk()),
    Case("directory-memory", "", "", on_disk(is_memory=True, kind="tmpfs"), on_disk()),
    Case(
        "directory-memory", "offload=mapped", "offload=host", on_disk(is_memory=True, kind="ramfs"), on_disk()
    ),
    Case("directory-pseudo", "", "", on_disk(kind="proc"), on_disk()),
    Case("directory-writable", "", "", on_disk(writable=False), on_disk(exists=False)),
    Case("directory-writable", "", "", on_disk(writable=False, exists=True), on_disk(exists=True)),
    Case("directory-folder", "", "", in_folders(is_folder=False), in_folders()),
    Case("directory-pseudo", "", "", in_folders(kind="proc"), in_folders()),
    Case("directory-writable", "", "", in_folders(writable=False), in_folders(is_folder=False)),
    Case("checkpoint-space", "", "", in_folders(free_bytes=999), in_folders(free_bytes=1000)),
    Case("directory-keeps", "", "", on_disk(write_error="came back changed"), on_disk(write_error="")),
    Case("directory-space", "", "", on_disk(free_bytes=999), on_disk(free_bytes=1000)),
    Case("directory-space", TWO, TWO, on_disks({"free_bytes": 1000}, {"free_bytes": 999}), on_disk()),
    # Each filesystem by itself, and one that two of them share by what both need.
    Case(
        "directory-space",
        TWO,
        TWO,
        on_disks({"free_bytes": 1999}, {"free_bytes": 1999, "device": 0}),
        on_disks({"free_bytes": 1000}, {"free_bytes": 1000}),
    ),
    Case("directory-list", "offload.directory=[/d/s,/d/s]", TWO),
    Case("directory-list", "offload.directory=[/d/s,/e,/d//s]", "offload.directory=[/d/s,/d/s] offload=host"),
    Case("directory-list", "'offload.directory=[]'", TWO),
    Case(
        "directory-absolute",
        "offload.directory=[/d/s,a,b/c]",
        TWO,
        MachineFacts(working_directory=Path("/h")),
    ),
    Case("directory-memory", TWO, TWO, on_disks({}, {"is_memory": True, "kind": "tmpfs"}), on_disks({}, {})),
    Case("directory-writable", TWO, TWO, on_disks({}, {"writable": False}), on_disks({}, {})),
    Case("directory-drives", TWO, TWO, on_disks({}, {"device": 0}), on_disks({}, {}), Level.WARNING),
    Case(
        "directory-speed",
        TWO,
        TWO,
        on_disks({"bytes_per_s": 5e9}, {"bytes_per_s": 3e9}),
        on_disks({"bytes_per_s": 5e9}, {"bytes_per_s": 4.5e9}),
        Level.NOTE,
    ),
    Case(
        "directory-root",
        "offload.directory=/d/s",
        "",
        on_disk(mount_point=Path("/")),
        on_disk(mount_point=Path("/")),
        Level.WARNING,
    ),
    Case(
        "directory-root",
        TWO,
        TWO,
        on_disks({}, {"mount_point": Path("/")}),
        on_disks({}, {"mount_point": Path("/"), "exists": True}),
        Level.WARNING,
    ),
    Case("directory-network", "", "", on_disk(is_network=True, kind="nfs4"), on_disk(), Level.WARNING),
    Case("directory-overlay", "", "", on_disk(kind="overlay"), on_disk(), Level.NOTE),
    Case("direct-io", "", "", on_disk(direct_io=False), on_disk(direct_io=True), Level.WARNING),
    Case("direct-io", "", "offload=mapped", on_disk(direct_io=False), on_disk(), Level.WARNING),
]
IDS = [f"{case.rule}-{number}" for number, case in enumerate(CASES)]


@functools.cache
def composed(words: str) -> Composition:
    return compose("tiny", shlex.split(words))


def rule_named(name: str) -> Rule:
    return next(rule for rule in all_rules() if rule.name == name)


def found_by(case: Case, words: str, facts: MachineFacts) -> list[Problem]:
    composition = composed(words)
    return rule_named(case.rule)(composition.config, composition.written, facts)


def as_overrides(fix: str) -> list[str]:
    """Return the words of a fix that can be pasted, an empty list for one that is a sentence."""
    words = shlex.split(fix)
    pasted = [word for word in words if is_known(word.partition("=")[0]) and not word.endswith("=...")]
    return pasted if len(pasted) == len(words) else []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_finds_the_bad_case_and_passes_the_good_one(case: Case) -> None:
    problems = found_by(case, case.bad, case.bad_facts)
    assert problems
    assert {problem.level for problem in problems} == {case.level}
    assert all(problem.rule == case.rule and problem.what.endswith((".", "?")) for problem in problems)
    assert found_by(case, case.good, case.good_facts) == []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_pasting_the_fix_makes_the_rule_pass(case: Case) -> None:
    for problem in found_by(case, case.bad, case.bad_facts):
        pasted = as_overrides(problem.fix)
        if not pasted:
            # A sentence must not look as if it could be pasted.
            assert not problem.fix or "=" not in problem.fix.split()[0] or problem.fix.endswith("=...")
            continue
        # Facts follow the directory and the plan: another one is judged on a machine that has it.
        follows = problem.fix.startswith(
            (
                "offload.directory=",
                "offload.engine=",
                "offload.host_memory_gb=",
                "offload.staging_mb=",
                *(f"{key}=" for key in FOLDERS),
            )
        )
        facts = case.good_facts if follows else case.bad_facts
        fixed = " ".join([case.bad, *map(shlex.quote, pasted)])
        assert problem.what not in {left.what for left in found_by(case, fixed, facts)}


def test_every_rule_has_a_case_a_reason_and_its_own_name() -> None:
    names = [rule.name for rule in all_rules()]
    assert len(set(names)) == len(names)
    assert {case.rule for case in CASES} == set(names)
    assert all(rule.reason.endswith(".") for rule in all_rules())


def test_good_recipes_pass_every_rule_when_nothing_is_known_of_the_machine() -> None:
    for recipe in find_recipes():
        composition = compose(recipe)
        found = check(composition.config, composition.written, NOTHING_KNOWN, here=False)
        assert refuses(found, strict=True) == []


@pytest.mark.parametrize("recipe", find_recipes())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_flag_that_a_key_gives_is_refused_a_second_time(recipe: str, device: str) -> None:
    given = megatron_flags(
        replace(compose(recipe).config, megatron=MegatronConfig()),
        device=device,
        transformer_engine=False,
        data_prefix="/d",
    )
    names = {word.removeprefix("--").replace("-", "_") for word in given if word.startswith("--")}
    assert {name for name in names if name not in OURS} <= FIXED_FLAGS


def test_what_only_the_machine_can_tell_is_a_note_for_a_run_meant_for_elsewhere() -> None:
    composition = composed("offload.fraction=3")
    facts = on_disk(is_memory=True, kind="tmpfs")
    levels = {p.rule: p.level for p in check(composition.config, composition.written, facts, here=False)}
    assert levels["directory-memory"] is Level.NOTE
    assert levels["fraction-range"] is Level.ERROR


def test_memory_that_is_not_there_is_told_with_what_takes_it_and_what_to_lower() -> None:
    composition = composed("offload.staging_mb=300000")
    (rings,) = rule_named("host-headroom")(composition.config, composition.written, LARGE_RINGS)
    assert "200.00 GiB of it staging rings" in rings.what
    assert rings.fix == "offload.staging_mb=192"
    facts = replace(TWO_HUNDRED_GB_OF_HOST, headroom_bytes=15 * 2**30, memory_limit_bytes=16 * 2**30)
    (budget,) = rule_named("host-headroom")(composition.config, composition.written, facts)
    assert "under its control group's limit of 16.00 GiB" in budget.what
    assert budget.fix == "offload.host_memory_gb=0"


def test_errors_are_told_before_warnings_and_notes() -> None:
    composition = composed("data=mock offload.chunk_mb=0 offload.windows=0")
    levels = [p.level for p in check(composition.config, composition.written, NOTHING_KNOWN)]
    assert levels == sorted(levels, key=list(Level).index)
    assert set(levels) == set(Level)


def test_a_disk_that_is_too_small_is_told_with_path_needed_and_free_and_does_not_fit() -> None:
    composition = composed("")
    facts = MachineFacts(
        directories=(
            DirectoryFacts(path=Path("/m/s"), nearest=Path("/m"), mount_point=Path("/m"), free_bytes=2**26),
        ),
        planned=PlannedFacts(directory_bytes=(2**28,)),
    )
    (problem,) = refuses(check(composition.config, composition.written, facts))
    assert problem.exit_code == 3
    for words in ("/m/s", "256.00 MiB", "64.00 MiB"):
        assert words in problem.what
    assert "192.00 MiB" in problem.fix


def test_of_several_directories_the_fit_ones_are_the_fix() -> None:
    composition = composed(TWO)
    for name, unfit in {
        "directory-memory": {"is_memory": True},
        "directory-pseudo": {"kind": "proc"},
    }.items():
        facts = on_disks({}, unfit, unfit)
        found = rule_named(name)(composition.config, composition.written, facts)
        assert [problem.fix for problem in found] == ["offload.directory=/d/s"] * 2


def test_every_folder_that_a_run_writes_into_is_judged_by_its_own_key() -> None:
    composition = composed("")
    found = rule_named("directory-pseudo")(composition.config, composition.written, in_folders(kind="proc"))
    assert [problem.keys for problem in found] == [(key,) for key in FOLDERS]
    assert {problem.exit_code for problem in found} == {3}


def test_weights_alone_are_not_judged_by_the_room_that_a_whole_checkpoint_takes() -> None:
    composition = composed("checkpoint.optimizer=false")
    facts = in_folders(free_bytes=9)
    assert rule_named("checkpoint-space")(composition.config, composition.written, facts) == []


def test_an_interval_of_checkpoints_that_go_nowhere_is_told_once() -> None:
    composition = composed("checkpoint.interval=1")
    (problem,) = refuses(check(composition.config, composition.written, NOTHING_KNOWN))
    assert problem.rule == "unused-checkpoint-keys"
