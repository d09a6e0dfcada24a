"""What each pipeline stage holds: decoder layers, embedding, further-token layers, final norm, output.

Rules of ``get_num_layers_to_build``, ``get_transformer_layer_offset``, ``mtp_on_this_rank``,
``has_final_layernorm_in_this_stage`` and ``PipelineParallelLayerLayout`` in megatron/core/transformer: a
stage holds one run of layers for each of its virtual stages, and runs follow each other virtual stage by
virtual stage, in each of them stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muon_offload_cli.config.rules.settings import has_flag, setting
from muon_offload_cli.config.rules.stages import (
    EMBEDDING,
    LAYOUT,
    LOSS,
    layout_rows,
    split_of,
    virtual_stages,
)
from muon_offload_cli.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChunk:
    """What one virtual stage of a pipeline stage holds.

    Attributes:
        layers: Numbers of its decoder layers, counted from 0 over the whole model.
        first: It holds the embedding.
        last: It holds the output weight.
        norm: It holds the final norm.
        further: Layers in it that predict a further token each.
    """

    layers: range
    first: bool
    last: bool
    norm: bool
    further: int


def model_chunks(config: Config) -> list[list[ModelChunk]]:
    """Return, for each pipeline stage of a run that the rules accept, its model chunks in order."""
    stages = config.parallel.pp
    # No layout given is no layout either.
    rows = layout_rows(str(argument(config, LAYOUT))) or _rows(config, stages)
    total = config.model.num_layers
    chunks: list[list[ModelChunk]] = [[] for _ in range(stages)]
    start = 0
    for number, row in enumerate(rows):
        count = row.count("t")
        end = start + count
        last = "L" in row
        # Without further-token layers the norm is the last stage's; with them, the last decoder layer's.
        norm = (count > 0 and end == total) if config.model.mtp_num_layers else last
        chunk = ModelChunk(
            layers=range(start, end), first="E" in row, last=last, norm=norm, further=row.count("m")
        )
        chunks[number % stages].append(chunk)
        start = end
    return chunks


def argument(config: Config, name: str) -> Any:
    """Return a setting by Megatron's name of it, a key of ours or in ``megatron.args``; None: not given."""
    return setting(config, name)[1]


def _rows(config: Config, stages: int) -> list[str]:
    """Write an even split, or one with its own first and last stage, as rows of a layout."""
    virtual, split = virtual_stages(config), split_of(config)
    counts = [split.middle] * stages
    counts[0] = split.first or counts[0]
    counts[-1] = split.last or counts[-1]
    rows = ["t" * (counts[stage] // virtual) for _ in range(virtual) for stage in range(stages)]
    # An embedding or loss that counts as a layer takes the place of one.
    if has_flag(config, EMBEDDING):
        rows[0] = rows[0][1:]
    if has_flag(config, LOSS):
        rows[-1] = rows[-1][1:]
    rows[0] = "E" + rows[0]
    rows[-1] += "m" * (config.model.mtp_num_layers or 0) + "L"
    return rows
