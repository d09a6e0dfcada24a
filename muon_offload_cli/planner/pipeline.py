"""What each pipeline stage holds: decoder layers, embedding, further-token layers, final norm, output.

Rules of ``get_num_layers_to_build``, ``get_transformer_layer_offset``, ``mtp_on_this_rank``,
``has_final_layernorm_in_this_stage`` and ``PipelineParallelLayerLayout`` in megatron/core/transformer: a
stage holds one run of layers for each of its virtual stages, and runs follow each other virtual stage by
virtual stage, in each of them stage by stage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from muon_offload_cli.config.rules.settings import setting
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import UserError, wrong

_LAYOUT = "parallel.pipeline_model_parallel_layout"
_LONGEST_LAYOUT = 100_000


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
    """Return, for each pipeline stage, its model chunks in order.

    Raises:
        UserError: The layers cannot be shared out so.
    """
    stages = config.parallel.pp
    layout = argument(config, "pipeline_model_parallel_layout")
    rows = _rows_of_layout(str(layout), stages) if layout is not None else _rows(config, stages)
    total = sum(row.count("t") for row in rows)
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
    if total != config.model.num_layers:
        what = f"{_LAYOUT}={layout} names {total} layers, and model.num_layers={config.model.num_layers}."
        raise wrong(what, "name each decoder layer by one t", _LAYOUT, "model.num_layers")
    return chunks


def argument(config: Config, name: str) -> Any:
    """Return a setting by Megatron's name of it, a key of ours or in ``megatron.args``; None: not given."""
    return setting(config, name)[1]


def _rows(config: Config, stages: int) -> list[str]:
    """Write an even split, or one with its own first and last stage, as rows of a layout."""
    virtual = _virtual_stages(config)
    counts = _layers_of_stages(config, stages)
    for count in counts:
        if count % virtual:
            raise wrong(
                f"a pipeline stage of {count} layers cannot be cut into {virtual} virtual stages.",
                "choose a number of virtual stages that divides the layers of every stage",
                "parallel.num_virtual_stages_per_pipeline_rank",
            )
    rows = ["t" * (counts[stage] // virtual) for _ in range(virtual) for stage in range(stages)]
    # An embedding or loss that counts as a layer takes the place of one.
    if argument(config, "account_for_embedding_in_pipeline_split"):
        rows[0] = rows[0][1:]
    if argument(config, "account_for_loss_in_pipeline_split"):
        rows[-1] = rows[-1][1:]
    rows[0] = "E" + rows[0]
    rows[-1] += "m" * (config.model.mtp_num_layers or 0) + "L"
    return rows


def _rows_of_layout(text: str, stages: int) -> list[str]:
    """Unroll a layout such as ``Ettt|(tt|)*29,m|L`` (``parse_str_to_list`` in Megatron)."""
    fix = f"{_LAYOUT}='E" + "t|" * (stages - 1) + "tL'"

    def unroll(found: re.Match[str]) -> str:
        part, times = found.group(1), int(found.group(2))
        if len(part) * times > _LONGEST_LAYOUT:
            raise wrong(f"{_LAYOUT}={text[:120]} is too long.", fix, _LAYOUT)
        return part * times

    rows = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        rows = re.sub(pattern, unroll, rows)
    found = rows.split("|")
    if set(rows) - set("Etm|L") or not rows.startswith("E") or not rows.endswith("L"):
        raise wrong(f"{_LAYOUT}={text} is no layout: it goes from E over t and m to L.", fix, _LAYOUT)
    if len(found) % stages:
        what = f"{_LAYOUT}={text} has {len(found)} parts, no multiple of parallel.pp={stages}."
        raise wrong(what, fix, _LAYOUT, "parallel.pp")
    return found


def _layers_of_stages(config: Config, stages: int) -> list[int]:
    layers = config.model.num_layers
    first = _count(argument(config, "decoder_first_pipeline_num_layers"))
    last = _count(argument(config, "decoder_last_pipeline_num_layers"))
    if stages == 1:
        return [layers]
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
        key = "megatron.args.num_layers_per_virtual_pipeline_stage"
        per_stage = config.model.num_layers // stages
        if per_chunk < 1 or per_stage % per_chunk:
            what = f"{key}={per_chunk} does not divide the {per_stage} layers of a pipeline stage."
            raise wrong(what, f"{key}=1", key)
        given = per_stage // per_chunk
    return max(given or 1, 1)


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _uneven(layers: int, stages: int) -> UserError:
    what = f"model.num_layers={layers} cannot be shared out over parallel.pp={stages} stages."
    return wrong(what, "parallel.pp=1", "model.num_layers", "parallel.pp")
