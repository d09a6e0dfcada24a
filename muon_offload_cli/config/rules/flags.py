"""Further Megatron flags: known to its parser, with values that it takes, and none that another key gives."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Set
from typing import Any

from muon_offload_cli.config.keys import FREE_PREFIX, leaf_types, nearest
from muon_offload_cli.config.rules.facts import FlagFacts, MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import count_of, flag_value, is_on
from muon_offload_cli.config.schema import Config, DataSource
from muon_offload_cli.errors import Level, Problem

# Flags of megatron/training/arguments.py that a key of another name gives; the value is that key.
_OTHER_NAMES: dict[str, str] = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "train_iters": "train.steps",
    "train_samples": "train.steps",
    "seq_length": "train.sequence_length",
    "max_position_embeddings": "train.sequence_length",
    "micro_batch_size": "train.micro_batch",
    "global_batch_size": "train.global_batch",
    "seed": "train.seed",
    "optimizer": "optimizer.name",
    "lr_warmup_iters": "optimizer.lr_warmup_steps",
    "use_distributed_optimizer": "optimizer.distributed",
    "use_layer_wise_distributed_optimizer": "optimizer.layer_wise",
    "use_layer_wise_param_layout": "megatron.param_layout",
    "no_use_layer_wise_param_layout": "megatron.param_layout",
    "muon_no_split_qkv": "optimizer.muon_split_qkv",
    "group_query_attention": "model.num_query_groups",
    "padded_vocab_size": "model.vocab_size",
    "untie_embeddings_and_output_weights": "model.tied_embeddings",
    "disable_bias_linear": "model.add_bias_linear",
    "init_method_std": "model.init_std",
    "num_experts": "model.moe.num_experts",
    "moe_router_topk": "model.moe.topk",
    "moe_shared_expert_intermediate_size": "model.moe.shared_expert_ffn_hidden_size",
    "moe_router_load_balancing_type": "model.moe.load_balancing",
    "data_path": "data.prefix",
    "train_data_path": "data.prefix",
    "mock_data": "data.source",
    "save": "checkpoint.directory",
    "save_interval": "checkpoint.interval",
    "no_save_optim": "checkpoint.optimizer",
    "load": "resume.source",
    "ckpt_step": "resume.step",
    "finetune": "resume.weights_only",
    "save_retain_interval": "checkpoint.keep",
}


def _same_names() -> Iterator[tuple[str, str]]:
    """Yield flags that a key of ours is named after, with that key."""
    for key in leaf_types():
        section, _, name = key.rpartition(".")
        if section in ("parallel", "model", "optimizer"):
            yield name, key
        elif section == "model.moe":
            yield f"moe_{name}", key


OURS: dict[str, str] = dict(_same_names()) | _OTHER_NAMES
"""Flags that a key of ours gives; the value is that key."""

LAYOUT_OPT_IN = "--use-layer-wise-param-layout"
"""Flag of Megatrons whose default is the compact layout, the other than that of `megatron.param_layout`."""

RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
EVERYWHERE = frozenset(RECOMPUTE)
"""Flags that every Megatron which can train here has, so that its parser need not be asked for them."""

_DATA = ("data.prefix", "data.source")


def ours_for(config: Config) -> dict[str, str]:
    """Return flags that a key of ours gives in this run: ``data=script`` leaves data to the script."""
    if config.data.source is DataSource.script:
        return {flag: key for flag, key in OURS.items() if key not in _DATA}
    return OURS


def spelled(name: str, value: Any) -> list[str]:
    """Write a flag for a parser: true gives the flag alone, false and null nothing, a list several values."""
    flag = "--" + name.lstrip("-").replace("_", "-")
    if not is_on(value):
        return []
    if value is True:
        return [flag]
    return [flag, *map(str, value if isinstance(value, list | tuple) else [value])]


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
                fix=f"name a flag, as in {FREE_PREFIX}log_interval=10",
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
    ours = ours_for(config)
    for name, value in config.megatron.args.items():
        flag = name.replace("-", "_")
        if flag in ours and is_on(value):
            key = ours[flag]
            what = f"{FREE_PREFIX}{name}={value} is what the key {key} gives to Megatron."
            yield Problem(what=what, fix=f"{FREE_PREFIX}{name}=null", keys=(FREE_PREFIX + name, key))


@rule(name="flag-unknown", reason="Megatron's own parser would stop every rank at a misspelled flag.")
def flag_unknown(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse flags that the parser of the Megatron at hand does not have; a script may add its own."""
    if facts.megatron is None or facts.megatron.flags is None:
        return
    known, version = facts.megatron.flags, facts.megatron.version
    script = config.megatron.entrypoint
    for name in config.megatron.args:
        flag = name.replace("-", "_")
        if flag in known or flag in OURS or not _FLAG.fullmatch(flag):
            continue
        near = nearest(flag, known, count=1)
        yield Problem(
            what=f"{FREE_PREFIX}{name[:80]}: Megatron{f' {version}' if version else ''} has no such flag."
            + (f" {script} must add it." if script else "")
            + (f" Did you mean {near[0]}?" if near else ""),
            fix=f"{FREE_PREFIX}{near[0]}=..." if near else "" if script else "leave it out",
            keys=(FREE_PREFIX + name,),
            level=Level.NOTE if script else Level.ERROR,
        )


@rule(
    name="flag-value", reason="Megatron's own parser would stop every rank at a value that it does not take."
)
def flag_takes(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse values that the parser of the Megatron at hand does not take, in its own words."""
    ours, known = ours_for(config), facts.megatron.flags if facts.megatron is not None else None
    for name, value in config.megatron.args.items():
        flag = name.replace("-", "_")
        takes = (known or {}).get(flag)
        told_elsewhere = flag in ours or flag in EVERYWHERE or isinstance(value, dict)
        if takes is None or told_elsewhere or not is_on(value):
            continue
        refusal = _refusal(spelled(name, value), takes)
        if refusal:
            near = nearest(str(value), map(str, takes.choices), count=1)
            yield Problem(
                what=f"{FREE_PREFIX}{name}={str(value)[:80]}: Megatron's parser says: {refusal}.",
                fix=f"{FREE_PREFIX}{name}={'true' if takes.nargs == 0 else near[0] if near else 'null'}",
                keys=(FREE_PREFIX + name,),
            )


def _refusal(words: list[str], takes: FlagFacts) -> str:
    """Return what argparse says of a flag and its value, empty if it takes them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    if takes.nargs == 0:
        parser.add_argument(words[0], action="store_true")
    else:
        kind = {"int": int, "float": float}.get(takes.kind, str)
        parser.add_argument(words[0], nargs=takes.nargs, type=kind, choices=takes.choices or None)
    try:
        _, left = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        return str(error)
    return f"unrecognized arguments: {' '.join(left)}" if left else ""


@rule(
    name="recompute", reason="Megatron would refuse these three together when every rank builds its layers."
)
def recompute(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse halves of a way to recompute (TransformerConfig.__post_init__ of Megatron)."""
    given = {flag: value for flag in RECOMPUTE if (value := flag_value(config, flag)) is not None}
    granularity, method, layers = map(given.get, RECOMPUTE)
    wanted: dict[str, object] = {}
    if granularity == "selective":
        wanted = {flag: "null" for flag in given if flag != RECOMPUTE[0]}
    else:
        fits = (granularity == "full", method in ("uniform", "block"), (count_of(layers) or 0) >= 1)
        for flag, fine, value in zip(RECOMPUTE, fits, ("full", "uniform", 1), strict=True):
            if not fine and (flag in given or (granularity is not None and flag != RECOMPUTE[0])):
                wanted[flag] = value
    if wanted:
        yield Problem(
            what=f"{', '.join(f'{FREE_PREFIX}{flag}={value}' for flag, value in given.items())}: "
            "recompute_granularity=full goes with recompute_method=uniform or block and a "
            "recompute_num_layers of 1 or more, and selective with neither.",
            fix=" ".join(f"{FREE_PREFIX}{flag}={value}" for flag, value in wanted.items()),
            keys=tuple(FREE_PREFIX + flag for flag in given),
        )
