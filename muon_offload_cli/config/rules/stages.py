"""How layers divide among pipeline stages and virtual stages: arithmetic for the rules and the plan alike."""

from __future__ import annotations

import re
from dataclasses import dataclass

from muon_offload_cli.config.rules.settings import count_of, has_flag, setting
from muon_offload_cli.config.schema import Config

FIRST = "decoder_first_pipeline_num_layers"
LAST = "decoder_last_pipeline_num_layers"
LAYOUT = "pipeline_model_parallel_layout"
LAYERS_PER_VIRTUAL = "num_layers_per_virtual_pipeline_stage"
VIRTUAL_PER_RANK = "num_virtual_stages_per_pipeline_rank"
CUTS = (FIRST, LAST, LAYOUT, LAYERS_PER_VIRTUAL, VIRTUAL_PER_RANK)
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"

_LONGEST_LAYOUT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Layers of the stages; the embedding and the loss count as a layer each where a flag says so.

    Attributes:
        first: Layers of the first stage, where they are given.
        last: Layers of the last stage, where they are given.
        left: Layers that the other stages share evenly.
        others: How many these are.
    """

    first: int | None
    last: int | None
    left: int
    others: int

    @property
    def is_whole(self) -> bool:
        """Whether every other stage gets the same whole number of layers, one at least."""
        if self.others <= 0:
            return self.left == self.others == 0
        return self.left > 0 and self.left % self.others == 0

    @property
    def middle(self) -> int:
        """Layers of each other stage."""
        return self.left // self.others if self.others > 0 else 0

    @property
    def counts(self) -> set[int]:
        """The different numbers of layers that stages have."""
        return {self.first or self.middle, self.last or self.middle, self.middle or self.first or 0}


def split_of(config: Config) -> Split:
    """Return how the stages of `parallel.pp` share the layers."""
    first, last = (count_of(setting(config, flag)[1]) for flag in (FIRST, LAST))
    counted = sum(has_flag(config, flag) for flag in (EMBEDDING, LOSS))
    return Split(
        first=first,
        last=last,
        left=config.model.num_layers + counted - (first or 0) - (last or 0),
        others=config.parallel.pp - (first is not None) - (last is not None),
    )


def virtual_stages(config: Config) -> int:
    """Return into how many virtual stages each stage of a valid split is cut."""
    per_virtual = count_of(setting(config, LAYERS_PER_VIRTUAL)[1])
    if per_virtual is not None:
        return split_of(config).middle // per_virtual
    return count_of(setting(config, VIRTUAL_PER_RANK)[1]) or 1


def layout_rows(text: str) -> list[str] | None:
    """Unroll a layout such as ``Ettt|(tt|)*29,m|L`` (``parse_str_to_list`` in Megatron).

    Returns:
        A row of letters a virtual stage; None if it is no layout, or a longer one than any model has.
    """
    rows = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        times = [(len(part), count) for part, count in re.findall(pattern, rows)]
        if any(len(count) > 6 or size * int(count) > _LONGEST_LAYOUT for size, count in times):
            return None
        rows = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), rows)
    if set(rows) - set("Etm|L") or not rows.startswith("E") or not rows.endswith("L"):
        return None
    return rows.split("|")
