"""How layers divide among pipeline stages: evenly, unevenly, and into virtual stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import count_of, has_flag, setting
from muon_offload_cli.config.rules.stages import (
    EMBEDDING,
    FIRST,
    LAST,
    LAYERS_PER_VIRTUAL,
    LAYOUT,
    LOSS,
    VIRTUAL_PER_RANK,
    layout_rows,
    split_of,
)
from muon_offload_cli.config.rules.topology import laid_out, largest_divisor, sizes_are_counts, topology_of
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem

_COUNTS = (FIRST, LAST, LAYERS_PER_VIRTUAL, VIRTUAL_PER_RANK)


def _given(config: Config, *flags: str) -> list[str]:
    return [flag for flag in flags if setting(config, flag)[1] is not None]


@rule(name="layers-pp", reason="Pipeline stages hold the same number of layers unless a split is given.")
def layers_over_pp(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse layers that pp does not divide (validate_args of megatron/training/arguments.py)."""
    layers, pp = config.model.num_layers, config.parallel.pp
    if pp <= 1 or layers < 1 or _given(config, FIRST, LAST, LAYOUT):
        return
    split = split_of(config)
    if not split.is_whole:
        counted = f" ({split.left} with embedding and loss)" if split.left != layers else ""
        yield Problem(
            what=f"model.num_layers={layers}{counted} is not a multiple of parallel.pp={pp}.",
            fix=laid_out(config, pp=largest_divisor(split.left, pp)),
            keys=("model.num_layers", "parallel.pp"),
        )


@rule(name="pipeline-counts", reason="Layers and virtual stages of a pipeline are counted from one.")
def pipeline_counts(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse splits that are no count."""
    for flag in _COUNTS:
        key, value = setting(config, flag)
        if value is not None and (count_of(value) or 0) < 1:
            yield Problem(what=f"{key}={value} is no number of 1 or more.", fix=f"{key}=null", keys=(key,))


@rule(name="uneven-pipeline", reason="What the first and last stage leave must divide among the others.")
def uneven_pipeline(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse first and last stages that leave layers over (TransformerConfig.__post_init__ of Megatron)."""
    given = _given(config, FIRST, LAST)
    counts = [count_of(setting(config, flag)[1]) for flag in given]
    layers, pp = config.model.num_layers, config.parallel.pp
    if not given or None in counts or layers < 1 or pp < 1:
        return
    keys = tuple(setting(config, flag)[0] for flag in given)
    shown = " and ".join(f"{key}={count}" for key, count in zip(keys, counts, strict=True))
    others = [flag for flag in (EMBEDDING, LOSS) if has_flag(config, flag)] + _given(config, LAYOUT)
    if others:
        names = ", ".join(setting(config, flag)[0] for flag in others)
        fix = " ".join(f"{setting(config, flag)[0]}=null" for flag in others)
        yield Problem(what=f"{shown} cannot be combined with {names}.", fix=fix, keys=keys)
        return
    split = split_of(config)
    if not split.is_whole:
        yield Problem(
            what=f"{shown} of model.num_layers={layers} leave {split.left} layers for {split.others} other "
            f"stages of parallel.pp={pp}.",
            fix=laid_out(config, pp=largest_divisor(layers, pp))
            if layers % pp
            else " ".join(f"{key}=null" for key in keys),
            keys=(*keys, "model.num_layers", "parallel.pp"),
        )


@rule(name="pipeline-layout", reason="A layout describes the whole pipeline, so nothing else may.")
def pipeline_layout(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a layout next to other splits, and one that names other stages or layers than there are."""
    key, layout = setting(config, LAYOUT)
    if layout is None:
        return
    others = [flag for flag in (EMBEDDING, LOSS) if has_flag(config, flag)]
    others += _given(config, LAYERS_PER_VIRTUAL, VIRTUAL_PER_RANK)
    if others:
        names = ", ".join(setting(config, flag)[0] for flag in others)
        yield Problem(what=f"{key} cannot be combined with {names}.", fix=f"{key}=null", keys=(key,))
    rows, layers, pp = layout_rows(str(layout)), config.model.num_layers, config.parallel.pp
    text = f"{key}={str(layout)[:80]}"
    if rows is None:
        yield Problem(
            what=f"{text} is no layout: it goes from E over t and m to L.", fix=f"{key}=null", keys=(key,)
        )
        return
    if pp >= 1 and len(rows) % pp:
        yield Problem(
            what=f"{text} has {len(rows)} stages, no multiple of parallel.pp={pp}.",
            fix=f"{key}=null",
            keys=(key, "parallel.pp"),
        )
    named = sum(row.count("t") for row in rows)
    if named != layers:
        yield Problem(
            what=f"{text} names {named} layers by a t each, and model.num_layers={layers}.",
            fix=f"{key}=null",
            keys=(key, "model.num_layers"),
        )


@rule(name="virtual-pipeline", reason="Virtual stages cut each pipeline rank's layers into equal pieces.")
def virtual_pipeline(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse virtual stages that do not divide the layers, or without a pipeline to interleave."""
    given = _given(config, LAYERS_PER_VIRTUAL, VIRTUAL_PER_RANK)
    layers, pp = config.model.num_layers, config.parallel.pp
    if not given or layers < 1 or pp < 1:
        return
    keys = tuple(setting(config, flag)[0] for flag in given)
    fix = " ".join(f"{key}=null" for key in keys)
    if len(given) == 2:
        yield Problem(
            what=f"{keys[0]} and {keys[1]} are two ways for one thing.", fix=f"{keys[0]}=null", keys=keys
        )
        return
    key, value = setting(config, given[0])
    count = count_of(value)
    if count is None or count < 1:
        return
    if pp <= 1 + has_flag(config, "no_overlap_p2p_communication"):
        what = f"{key}={value} needs a pipeline to interleave, and parallel.pp={pp}."
        yield Problem(what=what, fix=fix, keys=(key, "parallel.pp"))
        return
    uneven = bool(_given(config, FIRST, LAST))
    if uneven and given == [LAYERS_PER_VIRTUAL]:
        what = f"{key}={value} cannot be combined with an uneven first or last stage."
        yield Problem(what=what, fix=fix, keys=(key,))
        return
    split = split_of(config)
    for layers in sorted(split.counts) if split.is_whole else []:
        if layers % count:
            yield Problem(
                what=f"{key}={value} does not divide the {layers} layers of {'some' if uneven else 'each'} "
                f"of the stages of parallel.pp={pp}.",
                fix=f"{key}={largest_divisor(math.gcd(*split.counts), count)}",
                keys=(key, "model.num_layers", "parallel.pp"),
            )
            return


@rule(name="virtual-batches", reason="The interleaved schedule takes micro batches in groups of one a stage.")
def virtual_batches(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse fewer micro batches than stages (megatron/core/pipeline_parallel/schedules.py)."""
    if not _given(config, LAYERS_PER_VIRTUAL, VIRTUAL_PER_RANK) or not sizes_are_counts(config):
        return
    sizes, train = topology_of(config), config.train
    if sizes.dp < 1 or train.micro_batch < 1 or train.global_batch < 1:
        return
    step = train.micro_batch * sizes.dp
    if train.global_batch % step == 0 and train.global_batch // step < sizes.pp:
        yield Problem(
            what=f"train.global_batch={train.global_batch} gives {train.global_batch // step} micro batches, "
            f"fewer than parallel.pp={sizes.pp}, which virtual stages need.",
            fix=f"train.global_batch={sizes.pp * step}",
            keys=("train.global_batch", "parallel.pp"),
        )
