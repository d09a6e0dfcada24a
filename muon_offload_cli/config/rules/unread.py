"""Settings that a person wrote and that the chosen path never reads.

Dropping them in silence would be a run other than the one that was meant. `written` holds no key of a recipe
whose choice the command line replaced: ``recipe=tiny offload=none`` says nothing about the recipe's chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

from muon_offload_cli.checkpoints.names import step_of
from muon_offload_cli.config.keys import leaf_types
from muon_offload_cli.config.rules.directory import as_word
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.family import is_muon
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import flag_value, has_flag, value_of
from muon_offload_cli.config.schema import Config, DataSource, Engine
from muon_offload_cli.config.vocabulary import BYTE_SOURCES
from muon_offload_cli.errors import Problem

# Keys of `offload` that each engine reads, in the order in which they are shown.
OFFLOAD_KEYS: dict[Engine, tuple[str, ...]] = {
    Engine.none: (),
    Engine.host: ("chunk_mb", "fraction", "windows"),
    Engine.mapped: ("directory", "chunk_mb", "fraction", "host_memory_gb", "windows"),
    Engine.disk: (
        "directory",
        "chunk_mb",
        "fraction",
        "host_memory_gb",
        "windows",
        "io_threads",
        "staging_mb",
        "verify",
    ),
}
# Flags that only Adam's distributed optimizer reads (megatron/core/optimizer/optimizer_config.py and
# distrib_optimizer.py); layer-wise Muon keeps fp32 masters and one fp32 momentum whatever they say.
ADAM_FLAGS = (
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_torch_optimizer_for_cpu_offload",
)
_DATA_READERS = {
    "data.paths": (DataSource.text, DataSource.chat),
    "data.jsonl_key": (DataSource.text,),
    "data.prefix": (DataSource.indexed,),
    "data.cache_directory": BYTE_SOURCES,
}


NATIVE_KEYS = ("directory", "chunk_mb", "fraction")
"""What ``mapped`` reads where it extends an offloader that Megatron brings."""


def keys_read(engine: Engine, facts: MachineFacts) -> tuple[str, ...]:
    """Return the keys of `offload` that an engine reads on the Megatron at hand."""
    native = engine is Engine.mapped and facts.maps_natively
    return NATIVE_KEYS if native else OFFLOAD_KEYS[engine]


def _is_set(config: Config, key: str) -> bool:
    value = value_of(config, key)
    return value is not None and value != []


@rule(
    name="unused-offload-keys",
    reason="A setting that the chosen engine never reads would be dropped in silence.",
)
def offload_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a directory for an engine without files, staging for one without a ring, and their kind."""
    engine = config.offload.engine
    read = keys_read(engine, facts)
    for key in sorted(written):
        section, _, name = key.partition(".")
        if section != "offload" or name == "engine" or name in read or not _is_set(config, key):
            continue
        value = value_of(config, key)
        shown = as_word(value) if isinstance(value, list) else value
        through = " through Megatron's own offloader" if name in OFFLOAD_KEYS[engine] else ""
        yield Problem(
            what=f"{key}={shown} is written, and offload.engine={engine.name}{through} never reads it.",
            fix="leave it out, or offload.engine=disk",
            keys=(key, "offload.engine"),
        )


@rule(name="unused-optimizer-keys", reason="Adam has no Newton-Schulz steps and no orthogonal updates.")
def muon_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse Muon's keys written for Adam."""
    if config.optimizer.name == "adam":
        for key in sorted(written):
            if key.startswith("optimizer.muon_") or key == "megatron.param_layout":
                what = f"{key} is written, and optimizer.name=adam never reads it."
                yield Problem(what=what, fix="leave it out, or optimizer=dist_muon", keys=(key,))


@rule(
    name="unused-adam-flags",
    reason="Muon's masters and momentum are fp32 whatever flags for Adam's moments say.",
)
def adam_flags(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse Adam's flags (moment types, staging sizes, offload to the CPU) given for Muon."""
    if not is_muon(config.optimizer):
        return
    for flag in ADAM_FLAGS:
        if has_flag(config, flag):
            key = f"megatron.args.{flag}"
            yield Problem(
                what=f"{key}={flag_value(config, flag)} is Adam's, and "
                f"optimizer.name={config.optimizer.name} never reads it.",
                fix=f"{key}=null",
                keys=(key, "optimizer.name"),
            )


@rule(name="data-unused", reason="Data that is named and not read is a run on other data than was meant.")
def data_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse data settings next to a source that does not read them."""
    source = config.data.source
    for key, readers in _DATA_READERS.items():
        given = key in written or key in ("data.paths", "data.prefix")
        if given and _is_set(config, key) and source not in readers:
            yield Problem(
                what=f"{key} is set, and data.source={source.name} never reads it.",
                fix=f"{'' if key == 'data.paths' else 'leave it out, or '}data.source={readers[0].name}",
                keys=(key, "data.source"),
            )


@rule(name="unused-launcher-keys", reason="One machine meets itself; only several need an address.")
def launcher_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse an address for a single node."""
    launcher = config.launcher
    if launcher.nodes == 1 and "launcher.master_address" in written and launcher.master_address:
        yield Problem(
            what=f"launcher.master_address={launcher.master_address} is written, and launcher.nodes=1 never "
            "reads it.",
            fix="launcher.master_address=null",
            keys=("launcher.master_address", "launcher.nodes"),
        )


@rule(name="unused-checkpoint-keys", reason="Without a directory nothing is saved, however often.")
def checkpoint_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse an interval and its kind where nothing is saved."""
    if config.checkpoint.directory is not None:
        return
    for key in sorted(written):
        if key.startswith("checkpoint.") and key in leaf_types() and _is_set(config, key):
            yield Problem(
                what=f"{key}={value_of(config, key)} is written, and checkpoint.directory is not set: "
                "nothing is saved.",
                fix="checkpoint.directory=/absolute/folder",
                keys=(key, "checkpoint.directory"),
            )


@rule(name="unused-expert-keys", reason="A dense model has no experts to set up.")
def expert_keys(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse keys of experts written for a model without any."""
    if config.model.moe.num_experts is not None:
        return
    for key in sorted(written):
        if key.startswith("model.moe.") and key != "model.moe.num_experts" and _is_set(config, key):
            what = f"{key} is written, and the model {config.model.name} has no experts."
            yield Problem(what=what, fix="leave it out, or set model.moe.num_experts", keys=(key,))
    if config.parallel.etp is not None:
        yield Problem(
            what=f"parallel.etp={config.parallel.etp} cuts experts, and the model {config.model.name} "
            "has none.",
            fix="parallel.etp=null",
            keys=("parallel.etp", "model.moe.num_experts"),
        )


@rule(name="layer-wise-unread", reason="dist_muon is layer-wise by itself.")
def layer_wise(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse ``layer_wise=false`` next to a name that implies it."""
    if (
        config.optimizer.name == "dist_muon"
        and "optimizer.layer_wise" in written
        and not config.optimizer.layer_wise
    ):
        yield Problem(
            what="optimizer.layer_wise=false has no effect: optimizer.name=dist_muon is layer-wise.",
            fix="optimizer.layer_wise=true",
            keys=("optimizer.layer_wise",),
        )


@rule(
    name="unused-resume-step",
    reason="To go on from another step than was asked for is another run.",
)
def resume_step(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a step written for a source that names its step, or the newest, itself."""
    source, step = config.resume.source, config.resume.step
    if "resume.step" not in written or step is None:
        return
    if source in (None, "none", "auto") or source.isdecimal() or step_of(Path(source)) is not None:
        yield Problem(
            what=f"resume.step={step} is written, and resume={source or 'none'} never reads it.",
            fix="resume.step=null",
            keys=("resume.step", "resume.source"),
        )
