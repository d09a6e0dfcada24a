"""Pairs of settings of which each works and both together do not."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.errors import Problem

# Flags of Megatron that read, write, move or replace the master weights behind an engine's back.
UNSERVED: dict[str, str] = {
    "log_params_norm": "it reads every master weight on the GPU, where none is between steps",
    "qk_clip": "it writes master weights in place, and a chunk already on its way would lose the write",
    "optimizer_cuda_graph": "a captured graph replays fixed addresses, and chunks move",
    "full_iteration_cuda_graph": "a captured graph replays fixed addresses, and chunks move",
    "offload_optimizer_states": "it is Megatron's own offload: one of the two must do it",
    "chunked_optimizer_state_offload": "it is Megatron's own offload: one of the two must do it",
    "optimizer_cpu_offload": "it steps Adam on the CPU: one of the two must do it",
    "use_megatron_fsdp": "it shards the master weights itself",
    "use_torch_fsdp2": "it shards the master weights itself",
    "async_save": "it reads state in the background while the next step moves it",
    "use_precision_aware_optimizer": "its master weights are not Megatron's to hand over",
    "reuse_grad_buf_for_mxfp8_param_ag": "its parameter gather reads master weights elsewhere",
    "fp8_param_gather": "its parameter gather reads master weights elsewhere",
    "fp4_param_gather": "its parameter gather reads master weights elsewhere",
}


def is_on(value: Any) -> bool:
    """Tell whether a Megatron flag is given at all: false and null leave it out."""
    return value is not None and value is not False


def has_flag(config: Config, flag: str) -> bool:
    """Tell whether `megatron.args` turns a flag on, written with dashes or underscores."""
    return any(
        name.replace("-", "_") == flag and is_on(value) for name, value in config.megatron.args.items()
    )


@rule(
    name="unserved-readers",
    reason="These parts of Megatron touch master weights where an engine cannot serve them.",
)
def unserved_readers(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse readers and movers of master weights next to an engine."""
    if config.offload.engine is Engine.none:
        return
    for flag, reason in UNSERVED.items():
        if has_flag(config, flag):
            yield Problem(
                what=f"megatron.args.{flag} with offload.engine={config.offload.engine.name}: {reason}.",
                fix=f"megatron.args.{flag}=false",
                keys=(f"megatron.args.{flag}", "offload.engine"),
            )


@rule(
    name="full-iteration-graph",
    reason="A graph of the whole iteration contains the optimizer step, whose addresses move.",
)
def full_iteration_graph(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a graph of the full iteration next to an engine."""
    if config.offload.engine is Engine.none:
        return
    # The second is the older spelling (megatron/training/arguments.py moves it to the first).
    for flag in ("cuda_graph_impl", "cuda_graph_scope"):
        value = next((v for name, v in config.megatron.args.items() if name.replace("-", "_") == flag), None)
        if "full_iteration" in (value if isinstance(value, list) else [value]):
            yield Problem(
                what=f"megatron.args.{flag}=full_iteration with offload.engine="
                f"{config.offload.engine.name}: the graph would contain the optimizer step.",
                fix=f"megatron.args.{flag}=null",
                keys=(f"megatron.args.{flag}", "offload.engine"),
            )


@rule(name="fp16", reason="Muon takes bf16; Megatron's parser accepts fp16 and its builder then fails.")
def half_precision(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse fp16: every run here is bf16."""
    if has_flag(config, "fp16"):
        yield Problem(
            what="megatron.args.fp16: runs are bf16, and Muon's optimizer cannot be built for fp16.",
            fix="megatron.args.fp16=false",
            keys=("megatron.args.fp16",),
        )


@rule(name="param-gather", reason="The parameter gather is overlapped through the gradients' buckets.")
def param_gather(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse overlap_param_gather without overlap_grad_reduce."""
    if has_flag(config, "overlap_param_gather") and not has_flag(config, "overlap_grad_reduce"):
        yield Problem(
            what="megatron.args.overlap_param_gather needs megatron.args.overlap_grad_reduce.",
            fix="megatron.args.overlap_grad_reduce=true",
            keys=("megatron.args.overlap_param_gather", "megatron.args.overlap_grad_reduce"),
        )


@rule(name="optimizer-instances", reason="Layer-wise ownership is planned for one optimizer instance.")
def optimizer_instances(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse more than one distributed-optimizer instance next to an engine."""
    count = config.megatron.args.get("num_distributed_optimizer_instances", 1)
    if config.offload.engine is not Engine.none and count not in (1, "1", None):
        yield Problem(
            what=f"megatron.args.num_distributed_optimizer_instances={count} with offload.engine="
            f"{config.offload.engine.name}: one instance is supported.",
            fix="megatron.args.num_distributed_optimizer_instances=1",
            keys=("megatron.args.num_distributed_optimizer_instances", "offload.engine"),
        )
