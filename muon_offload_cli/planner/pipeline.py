"""Which decoder layers a pipeline stage holds.

Rule of ``get_num_layers_to_build`` and ``get_transformer_layer_offset`` in megatron/core/transformer: a stage
holds one run of layers for each of its virtual stages, and runs follow each other virtual stage by virtual
stage, in each of them stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muon_offload_cli.config.rules.settings import setting
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import UserError, wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChunk:
    """What one virtual stage of a pipeline stage holds.

    Attributes:
        layers: Numbers of its decoder layers, counted from 0 over the whole model.
        first: It holds the embedding.
        last: It holds the final norm and the output weight.
    """

    layers: range
    first: bool
    last: bool


def model_chunks(config: Config) -> list[list[ModelChunk]]:
    """Return, for each pipeline stage, its model chunks in order.

    Raises:
        UserError: The layers cannot be shared out so.
    """
    stages, virtual = config.parallel.pp, _virtual_stages(config)
    counts = _layers_of_stages(config, stages)
    for count in counts:
        if count % virtual:
            raise wrong(
                f"a pipeline stage of {count} layers cannot be cut into {virtual} virtual stages.",
                "choose a number of virtual stages that divides the layers of every stage",
                "parallel.pp",
            )
    chunks: list[list[ModelChunk]] = [[] for _ in range(stages)]
    start = 0
    for turn in range(virtual):
        for stage in range(stages):
            first, last = turn == stage == 0, turn == virtual - 1 and stage == stages - 1
            count = counts[stage] // virtual
            # An embedding or loss that counts as a layer takes the place of one.
            count -= first and bool(argument(config, "account_for_embedding_in_pipeline_split"))
            count -= last and bool(argument(config, "account_for_loss_in_pipeline_split"))
            chunks[stage].append(ModelChunk(layers=range(start, start + count), first=first, last=last))
            start += count
    return chunks


def argument(config: Config, name: str) -> Any:
    """Return a setting by Megatron's name of it, a key of ours or in ``megatron.args``; None: not given."""
    return setting(config, name)[1]


def _layers_of_stages(config: Config, stages: int) -> list[int]:
    if argument(config, "pipeline_model_parallel_layout") is not None:
        raise wrong(
            "the planner does not read megatron.args.pipeline_model_parallel_layout.",
            "use decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers",
            "megatron.args.pipeline_model_parallel_layout",
        )
    layers = config.model.num_layers
    first = _count(argument(config, "decoder_first_pipeline_num_layers"))
    last = _count(argument(config, "decoder_last_pipeline_num_layers"))
    if first is None and last is None:
        layers += bool(argument(config, "account_for_embedding_in_pipeline_split"))
        layers += bool(argument(config, "account_for_loss_in_pipeline_split"))
    middle = stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if left < 0 or (left and middle < 1) or (middle > 0 and left % middle):
        raise _uneven(layers, stages)
    counts = [left // middle if middle > 0 else 0] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _virtual_stages(config: Config) -> int:
    stages = config.parallel.pp
    if stages == 1:
        return 1
    given = _count(argument(config, "num_virtual_stages_per_pipeline_rank"))
    per_chunk = _count(argument(config, "num_layers_per_virtual_pipeline_stage"))
    if given is None and per_chunk is not None:
        per_stage = config.model.num_layers // stages
        if per_chunk < 1 or per_stage % per_chunk:
            raise wrong(
                f"megatron.args.num_layers_per_virtual_pipeline_stage={per_chunk} does not divide the "
                f"{per_stage} layers of a pipeline stage.",
                "megatron.args.num_layers_per_virtual_pipeline_stage=1",
                "megatron.args.num_layers_per_virtual_pipeline_stage",
            )
        given = per_stage // per_chunk
    return max(given or 1, 1)


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _uneven(layers: int, stages: int) -> UserError:
    return wrong(
        f"model.num_layers={layers} cannot be shared out over parallel.pp={stages} stages.",
        "parallel.pp=1",
        "model.num_layers",
        "parallel.pp",
    )
