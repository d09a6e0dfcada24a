"""Pairs of settings of which each works and both together do not."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.family import ADAPTIVE_MUON, is_muon
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import conflicting_flags, flag_value, has_flag
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
    "rl_offload_optimizer_during_inference": "it moves the whole optimizer, which an engine does already",
    "use_megatron_fsdp": "it shards the master weights itself",
    "use_torch_fsdp2": "it shards the master weights itself",
    "use_precision_aware_optimizer": "its master weights are not Megatron's to hand over",
    "reuse_grad_buf_for_mxfp8_param_ag": "its parameter gather reads master weights elsewhere",
    "fp8_param_gather": "its parameter gather reads master weights elsewhere",
    "fp4_param_gather": "its parameter gather reads master weights elsewhere",
}

# Flags that Megatron's builders refuse for Muon, on every rank and after start-up.
NOT_FOR_MUON: dict[str, str] = {
    "use_precision_aware_optimizer": "it exists for Adam's distributed optimizer alone",
    "optimizer_cpu_offload": "it steps Adam on the CPU",
    "use_megatron_fsdp": "Megatron-FSDP takes no emerging optimizer",
    "use_torch_fsdp2": "Torch-FSDP2 takes no emerging optimizer",
}
# Offloaders of Megatron's own, in versions that have one.
NATIVE_OFFLOADERS = ("offload_optimizer_states", "chunked_optimizer_state_offload")
FULL_ITERATION_FLAGS = ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules")


@rule(
    name="unserved-readers",
    reason="These parts of Megatron touch master weights where an engine cannot serve them.",
)
def unserved_readers(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse readers and movers of master weights next to an engine."""
    if config.offload.engine is not Engine.none:
        yield from conflicting_flags(config, UNSERVED, "offload.engine")


@rule(
    name="full-iteration-graph",
    reason="A graph of the whole iteration contains the optimizer step, whose addresses move.",
)
def full_iteration_graph(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a graph of the full iteration next to an engine, in all of Megatron's spellings."""
    if config.offload.engine is Engine.none:
        return
    for flag in FULL_ITERATION_FLAGS:
        value = flag_value(config, flag)
        if "full_iteration" in (value if isinstance(value, list) else [value]):
            yield Problem(
                what=f"megatron.args.{flag}=full_iteration with offload.engine="
                f"{config.offload.engine.name}: the graph would contain the optimizer step.",
                fix=f"megatron.args.{flag}=null",
                keys=(f"megatron.args.{flag}", "offload.engine"),
            )


@rule(name="not-for-muon", reason="Megatron refuses these for Muon only after every rank has started.")
def not_for_muon(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse flags of other optimizers for resident Muon; next to an engine they are refused as such."""
    if config.offload.engine is Engine.none and is_muon(config.optimizer):
        yield from conflicting_flags(config, NOT_FOR_MUON, "optimizer.name")


@rule(
    name="native-layout",
    reason="Megatron's own offloader refuses the shard-aligned layout for Muon.",
)
def native_layout(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse the shard-aligned layout for Muon under an offloader of Megatron's own."""
    if not is_muon(config.optimizer) or not config.megatron.param_layout:
        return
    given = _native(config, facts)
    if given is not None:
        yield Problem(
            what=f"{given} offloads Muon through the Megatron at hand itself, which does not work with "
            "megatron.param_layout=true.",
            fix="megatron.param_layout=false",
            keys=(given.partition("=")[0], "megatron.param_layout"),
        )


def _native(config: Config, facts: MachineFacts) -> str | None:
    """Return what hands Muon to an offloader of Megatron's own, as it is written; None: nothing does."""
    if config.offload.engine is Engine.mapped and facts.maps_natively:
        return "offload.engine=mapped"
    if config.offload.engine is not Engine.none:
        return None
    return next((f"megatron.args.{flag}" for flag in NATIVE_OFFLOADERS if has_flag(config, flag)), None)


@rule(
    name="adaptive-native",
    reason="An offloader of Megatron's own plans one fp32 momentum, and adaptive Muon keeps a second moment.",
)
def adaptive_native(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse adaptive Muon under an offloader of Megatron's own."""
    given = _native(config, facts)
    if given is not None and config.optimizer.name == ADAPTIVE_MUON:
        key, _, value = given.partition("=")
        yield Problem(
            what=f"{given} with optimizer.name={ADAPTIVE_MUON}: Megatron's offloader plans one fp32 momentum "
            "alone, and there is a second moment.",
            fix=f"{key}={'disk' if value else 'null'}",
            keys=(key, "optimizer.name"),
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
    flag = "num_distributed_optimizer_instances"
    count = flag_value(config, flag)
    if config.offload.engine is not Engine.none and count not in (1, "1", None):
        yield Problem(
            what=f"megatron.args.{flag}={count} with offload.engine={config.offload.engine.name}: "
            "one instance is supported.",
            fix=f"megatron.args.{flag}=1",
            keys=(f"megatron.args.{flag}", "offload.engine"),
        )


@rule(name="checkpoint-format", reason="Only torch_dist writes layer-wise state by parameter, in any order.")
def checkpoint_format(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse formats that Muon or an engine cannot save its state in."""
    value = flag_value(config, "ckpt_format")
    if value is None or not is_muon(config.optimizer):
        return
    streamed = config.offload.engine is not Engine.none and _saves_state(config)
    allowed = ("torch_dist",) if streamed else ("torch_dist", "torch")
    if value not in allowed:
        saved = (
            f" while the state of offload.engine={config.offload.engine.name} is saved" if streamed else ""
        )
        yield Problem(
            what=f"megatron.args.ckpt_format={value} with optimizer.name={config.optimizer.name}{saved}: "
            f"{' and '.join(allowed)} can hold it.",
            fix="megatron.args.ckpt_format=torch_dist",
            keys=("megatron.args.ckpt_format", "checkpoint.directory"),
        )


def _saves_state(config: Config) -> bool:
    return config.checkpoint.directory is not None and config.checkpoint.optimizer
