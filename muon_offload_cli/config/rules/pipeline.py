"""How layers divide among pipeline stages: evenly, unevenly, and into virtual stages."""

from __future__ import annotations

from collections.abc import Iterator, Set

from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import count_of, has_flag, setting
from muon_offload_cli.config.rules.topology import largest_divisor, sizes_are_counts, topology_of
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Problem

FIRST = "decoder_first_pipeline_num_layers"
LAST = "decoder_last_pipeline_num_layers"
LAYOUT = "pipeline_model_parallel_layout"
LAYERS_PER_VIRTUAL = "num_layers_per_virtual_pipeline_stage"
VIRTUAL_PER_RANK = "num_virtual_stages_per_pipeline_rank"
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
_COUNTS = (FIRST, LAST, LAYERS_PER_VIRTUAL, VIRTUAL_PER_RANK)


def _given(config: Config, *flags: str) -> list[str]:
    return [flag for flag in flags if setting(config, flag)[1] is not None]


def _accounted_layers(config: Config) -> int:
    """Layers, the embedding and the loss counted as one each where a flag says so."""
    return config.model.num_layers + sum(has_flag(config, flag) for flag in (EMBEDDING, LOSS))


@rule(name="layers-pp", reason="Pipeline stages hold the same number of layers unless a split is given.")
def layers_over_pp(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse layers that pp does not divide (validate_args of megatron/training/arguments.py)."""
    layers, pp = config.model.num_layers, config.parallel.pp
    if pp <= 1 or layers < 1 or _given(config, FIRST, LAST, LAYOUT):
        return
    accounted = _accounted_layers(config)
    if accounted % pp:
        counted = f" ({accounted} with embedding and loss)" if accounted != layers else ""
        yield Problem(
            what=f"model.num_layers={layers}{counted} is not a multiple of parallel.pp={pp}.",
            fix=f"parallel.pp={largest_divisor(accounted, pp)}",
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
    fix = " ".join(f"{key}=null" for key in keys)
    others = [flag for flag in (EMBEDDING, LOSS) if has_flag(config, flag)] + _given(config, LAYOUT)
    if others:
        names = ", ".join(setting(config, flag)[0] for flag in others)
        yield Problem(what=f"{shown} cannot be combined with {names}.", fix=fix, keys=keys)
        return
    left, stages = layers - sum(count or 0 for count in counts), pp - len(given)
    if left < 0 or stages < 0 or bool(left) != bool(stages) or (stages and left % stages):
        yield Problem(
            what=f"{shown} of model.num_layers={layers} leave {left} layers for {stages} other stages of "
            f"parallel.pp={pp}.",
            fix=fix,
            keys=(*keys, "model.num_layers", "parallel.pp"),
        )


@rule(name="pipeline-layout", reason="A layout describes the whole pipeline, so nothing else may.")
def pipeline_layout(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a layout next to other splits, and one whose stages pp does not divide."""
    key, layout = setting(config, LAYOUT)
    if layout is None:
        return
    others = [flag for flag in (EMBEDDING, LOSS) if has_flag(config, flag)]
    others += _given(config, LAYERS_PER_VIRTUAL, VIRTUAL_PER_RANK)
    if others:
        names = ", ".join(setting(config, flag)[0] for flag in others)
        yield Problem(what=f"{key} cannot be combined with {names}.", fix=f"{key}=null", keys=(key,))
    text, pp = str(layout), config.parallel.pp
    # A multiplier may stand before or after a group of stages, so that only plain layouts are counted.
    stages = text.count("|") + 1
    if pp >= 1 and "(" not in text and stages % pp:
        yield Problem(
            what=f"{key}={text[:80]} has {stages} stages, no multiple of parallel.pp={pp}.",
            fix=f"{key}=null",
            keys=(key, "parallel.pp"),
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
    if _given(config, FIRST, LAST):
        if given == [LAYERS_PER_VIRTUAL]:
            what = f"{key}={value} cannot be combined with an uneven first or last stage."
            yield Problem(what=what, fix=fix, keys=(key,))
        return
    accounted = _accounted_layers(config)
    if accounted % pp == 0 and (accounted // pp) % count:
        yield Problem(
            what=f"{key}={value} does not divide the {accounted // pp} layers of each of the stages of "
            f"parallel.pp={pp}.",
            fix=f"{key}={largest_divisor(accounted // pp, count)}",
            keys=(key, "model.num_layers", "parallel.pp"),
        )


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
