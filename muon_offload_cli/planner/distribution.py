"""Who holds what: the parameters of every pipeline stage shared out over its data-parallel ranks.

Ranks are told apart by their stage, their place in the data-parallel group and their place in the expert
data-parallel group; all ranks that agree in these are of one kind, and are looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muon_offload_cli.config.rules.family import is_layer_wise
from muon_offload_cli.config.schema import Config
from muon_offload_cli.planner.inventory import Inventory
from muon_offload_cli.planner.ownership import (
    ParamLayout,
    by_size_and_group,
    by_size_and_place,
    deal,
    pack,
    slice_bytewise,
)
from muon_offload_cli.planner.pipeline import argument
from muon_offload_cli.planner.tensors import Optimizer, TensorInfo
from muon_offload_cli.topology import Topology

SMALLEST_BUCKET = 40_000_000
"""Elements; ``resolve_ddp_bucket_size`` in megatron/training/training.py."""

BUCKET_A_RANK = 1_000_000
"""Elements a data-parallel rank; the same place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """What tells ranks apart.

    Attributes:
        stage: Pipeline stage.
        dense: Place in the data-and-context-parallel group.
        expert: Place in the expert data-parallel group.
    """

    stage: int
    dense: int
    expert: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one kind of rank keeps state for.

    Attributes:
        muon: Parameters whose state is here, whole, in the order of the optimizer's groups.
        adam_elements: Elements of which Adam's state is here.
        held_elements: Elements of all weights here.
    """

    muon: tuple[TensorInfo, ...]
    adam_elements: int
    held_elements: int


def place_of(rank: int, sizes: Topology) -> RankPlace:
    """Return a rank's place; ranks are numbered tensor- before data- before pipeline-parallel.

    Order ``tp-cp-ep-dp-pp`` (megatron/core/parallel_state.py, RankGenerator).
    """
    per_stage = sizes.world_size // sizes.pp
    stage, local = divmod(rank, per_stage)
    return RankPlace(stage=stage, dense=local // sizes.tp, expert=local // (sizes.etp * sizes.ep))


def ranks_by_place(sizes: Topology) -> dict[RankPlace, list[int]]:
    """Return all ranks of each kind."""
    kinds: dict[RankPlace, list[int]] = {}
    for rank in range(sizes.world_size):
        kinds.setdefault(place_of(rank, sizes), []).append(rank)
    return kinds


class Distribution:
    """Shares the parameters of an inventory out, stage by stage, as they are asked for."""

    def __init__(self, config: Config, inventory: Inventory, layout: ParamLayout) -> None:
        self._config = config
        self._inventory = inventory
        self._layout = layout
        self._stages: dict[int, _Stage] = {}

    def share(self, place: RankPlace) -> Share:
        """Return what the ranks at `place` keep state for."""
        if place.stage not in self._stages:
            self._stages[place.stage] = _Stage(self._config, self._inventory, self._layout, place.stage)
        return self._stages[place.stage].share(place)


class _Stage:
    """One pipeline stage, its owners computed once."""

    def __init__(self, config: Config, inventory: Inventory, layout: ParamLayout, stage: int) -> None:
        sizes = inventory.sizes
        tensors = inventory.stages[stage]
        self._held = sum(tensor.numel for tensor in tensors)
        dense_ranks, expert_ranks = sizes.world_size // (sizes.tp * sizes.pp), sizes.expert_dp
        self._muon: dict[bool, list[list[TensorInfo]]] = {
            False: [[] for _ in range(dense_ranks)],
            True: [[] for _ in range(max(expert_ranks, 1))],
        }
        self._adam: dict[bool, list[int]] = {
            False: [0] * dense_ranks,
            True: [0] * max(expert_ranks, 1),
        }
        layer_wise = is_layer_wise(config.optimizer)
        if not layer_wise or dense_ranks == 1:
            # Nobody shares: every rank keeps the state of all that it holds.
            self._keep_all(tensors, bytewise=config.optimizer.distributed and not layer_wise)
        elif layout is ParamLayout.DEALT:
            self._deal(by_size_and_group(tensors))
        else:
            self._share_by_buffer(config, tensors, stage, pack_muon=layout is ParamLayout.PACKED)
            if layout is ParamLayout.COMPACT:
                self._deal(by_size_and_place([t for t in tensors if t.optimizer is Optimizer.MUON]))

    def share(self, place: RankPlace) -> Share:
        dense, expert = self._muon[False][place.dense], self._muon[True][place.expert]
        return Share(
            muon=(*dense, *expert),
            adam_elements=self._adam[False][place.dense] + self._adam[True][place.expert],
            held_elements=self._held,
        )

    def _assign(self, tensors: Sequence[TensorInfo], owners: Sequence[int]) -> None:
        for tensor, owner in zip(tensors, owners, strict=True):
            if tensor.optimizer is Optimizer.MUON:
                self._muon[tensor.expert][owner].append(tensor)
            else:
                self._adam[tensor.expert][owner] += tensor.numel

    def _keep_all(self, tensors: Sequence[TensorInfo], *, bytewise: bool) -> None:
        for tensor in tensors:
            if tensor.optimizer is Optimizer.MUON:
                for owned in self._muon[tensor.expert]:
                    owned.append(tensor)
            elif not bytewise:
                self._adam[tensor.expert] = [kept + tensor.numel for kept in self._adam[tensor.expert]]
        if bytewise:
            for expert in (False, True):
                self._slice([t for t in tensors if t.expert is expert], expert, None)

    def _deal(self, tensors: Sequence[TensorInfo]) -> None:
        # In the order in which they are dealt, the optimizer also holds them.
        self._assign(tensors, deal(tensors, len(self._muon[False]), len(self._muon[True])))

    def _share_by_buffer(
        self, config: Config, tensors: Sequence[TensorInfo], stage: int, *, pack_muon: bool
    ) -> None:
        """Cut Adam's buffers bytewise and, if asked for, pack the parameters of Muon's into shards."""
        for chunk in sorted({tensor.chunk for tensor in tensors}):
            bucket_size = _bucket_size(config, self._held, len(self._adam[False]), stage, chunk)
            for expert in (False, True):
                group = [t for t in tensors if t.chunk == chunk and t.expert is expert]
                if pack_muon:
                    matrices = [t for t in group if t.optimizer is Optimizer.MUON]
                    self._assign(matrices, pack(matrices, len(self._muon[expert]), bucket_size))
                self._slice([t for t in group if t.optimizer is Optimizer.ADAM], expert, bucket_size)

    def _slice(self, tensors: Sequence[TensorInfo], expert: bool, bucket_size: int | None) -> None:
        for rank, pieces in enumerate(slice_bytewise(tensors, len(self._adam[expert]), bucket_size)):
            self._adam[expert][rank] += sum(pieces.values())


def _bucket_size(config: Config, parameters: int, ranks: int, stage: int, chunk: int) -> int | None:
    """Return the elements of a bucket; later stages and chunks have one bucket (Megatron's ``get_model``)."""
    split = argument(config, "overlap_grad_reduce")
    if not split or stage > 0 or chunk > 0 or argument(config, "overlap_param_gather_with_optimizer_step"):
        return None
    number, size = argument(config, "ddp_num_buckets"), argument(config, "ddp_bucket_size")
    if number is not None:
        return parameters // int(number)
    return max(SMALLEST_BUCKET, BUCKET_A_RANK * ranks) if size is None else int(size)
