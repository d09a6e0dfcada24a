"""The plan of a run: every kind of rank, the node that has most to do, and the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from muon_offload_cli.config.rules.settings import has_flag
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.offload.directories import bytes_by_directory
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.planner.distribution import Distribution, RankPlace, Share, place_of, ranks_by_place
from muon_offload_cli.planner.inventory import Inventory, take_inventory
from muon_offload_cli.planner.ownership import ParamLayout
from muon_offload_cli.planner.rank import (
    ADAM_STATE_BYTES,
    WEIGHT_BYTES,
    RankFigures,
    muon_state_bytes,
    rank_figures,
)
from muon_offload_cli.planner.settings import offload_settings
from muon_offload_cli.planner.tensors import Layers, Optimizer, TensorInfo
from muon_offload_cli.units import KIB

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=weight)\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKind:
    """Ranks whose figures are equal.

    Attributes:
        ranks: Their global numbers.
        stage: Their pipeline stage.
        figures: See `RankFigures`.
    """

    ranks: tuple[int, ...]
    stage: int
    figures: RankFigures


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTotal:
    """Sums over the ranks of one machine, in bytes.

    Attributes:
        node: Number of the machine.
        disk_bytes: Reserved in its offload directories.
        rank_disk_bytes: The same by local rank.
        host_bytes: Host memory that holds state between steps.
        staging_bytes: Host memory of all staging rings.
        device_bytes: What its ranks have on their devices while they step, activations not counted.
        muon_state_bytes: Momenta, master weights and second moments, wherever they are.
        each_way_bytes: What a step reads from its drives, and as much that it writes to them.
        each_way_behind_bytes: See `RankFigures`.
        open_files: Files that offloaders keep open.
        maps: Mappings that they make.
    """

    node: int
    disk_bytes: int
    rank_disk_bytes: tuple[int, ...]
    host_bytes: int
    staging_bytes: int
    device_bytes: int
    muon_state_bytes: int
    each_way_bytes: int
    each_way_behind_bytes: int
    open_files: int
    maps: int

    def by_directory(self, count: int) -> tuple[int, ...]:
        """Return what is reserved in each of `count` offload directories."""
        return bytes_by_directory(self.rank_disk_bytes, count)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeParameter:
    """A parameter by the pattern of its name, layers and experts left open.

    Attributes:
        name: ``decoder.layers.*.mlp.linear_fc1.weight``.
        shape: Local shape on a rank.
        count: How many there are, each counted once a rank's part.
        state_bytes: All state of one.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    state_bytes: int


ARCHIVE_BYTES = 12 * KIB
"""Rounded up, of each parameter's part in a checkpoint: archives of torch, 1.7 KiB a tensor, its place in the
metadata, and its hashes in the seal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """What a run will put where.

    Attributes:
        engine: `offload.engine`.
        on_cpu: Ranks train on the CPU, where what is on the device is host memory too.
        layers: What Megatron builds its layers from.
        parameters: Elements of the whole model, each once, padding of the vocabulary included.
        muon_parameters: Those that Muon steps.
        adam_parameters: The others.
        kinds: Ranks with equal figures, those with most on disk first.
        nodes: One total a machine.
        largest: The largest parameter that Muon steps; None if there is none.
        oversized: Parameters whose state is larger than a chunk, which get a chunk of their own.
        checkpoint_bytes: One checkpoint with optimizer state: weights, masters, momenta, Adam's moments, and
            what holds them together.
    """

    engine: str
    on_cpu: bool
    layers: Layers
    parameters: int
    muon_parameters: int
    adam_parameters: int
    kinds: tuple[RankKind, ...]
    nodes: tuple[NodeTotal, ...]
    largest: LargeParameter | None
    oversized: tuple[LargeParameter, ...]
    checkpoint_bytes: int

    @property
    def heaviest(self) -> RankKind:
        """The kind of rank with most on disk, then in host memory, then on the device."""
        return self.kinds[0]

    @property
    def heaviest_node(self) -> NodeTotal:
        """The machine with most on disk, then in host memory."""
        return max(self.nodes, key=lambda node: (node.disk_bytes, node.host_bytes, -node.node))

    def fixed_host_bytes(self, node: NodeTotal) -> int:
        """Return the host memory of `node` that holds no state for good: rings, and on CPUs the device."""
        return node.staging_bytes + node.device_bytes * self.on_cpu

    @property
    def host_bytes(self) -> int:
        """All host memory that the heaviest machine's ranks need, activations on CPUs not counted."""
        return self.heaviest_node.host_bytes + self.fixed_host_bytes(self.heaviest_node)


class Planner:
    """Plans one model on one layout, for as many offload settings as are asked for.

    Args:
        config: A run that the rules accept, ``offload.host_memory_gb`` a number.
        layers: What Megatron will build its layers from.
        compact: Megatron has the compact layout, where it is not asked for the shard-aligned one.

    Raises:
        UserError: The model cannot be shared out over the pipeline.
    """

    def __init__(self, config: Config, layers: Layers, *, compact: bool = False) -> None:
        self._config = config
        self._item_bytes = muon_state_bytes(config.optimizer)
        self.inventory: Inventory = take_inventory(config, layers)
        self.layers = layers
        self.compact = compact
        layout = ParamLayout.COMPACT if compact else ParamLayout.DEALT
        if config.megatron.param_layout:
            layout = ParamLayout.PACKED
        self._distribution = Distribution(config, self.inventory, layout)
        self._places = ranks_by_place(self.inventory.sizes)

    def plan(self, settings: OffloadSettings | None = None) -> RunPlan:
        """Return the plan under `settings`, those of the config if None."""
        settings = settings or offload_settings(self._config)
        figures = self._figures(settings)
        inventory = self.inventory
        muon = inventory.parameters(Optimizer.MUON)
        total = inventory.parameters()
        return RunPlan(
            engine=settings.engine,
            on_cpu=self._config.device is Device.cpu,
            layers=self.layers,
            parameters=total,
            muon_parameters=muon,
            adam_parameters=total - muon,
            kinds=_kinds(figures, self._places),
            nodes=self._node_totals(figures),
            largest=next(iter(self._largest(0)), None),
            oversized=tuple(self._largest(settings.chunk_bytes)) if settings.chunk_bytes else (),
            checkpoint_bytes=total * WEIGHT_BYTES
            + muon * self._item_bytes
            + (total - muon) * ADAM_STATE_BYTES
            + ARCHIVE_BYTES * sum(tensor.parts for tensors in inventory.stages for tensor in tensors),
        )

    def of_rank(self, rank: int) -> tuple[tuple[TensorInfo, ...], Share]:
        """Return the tensors of one rank, and what it keeps state for."""
        place = place_of(rank, self.inventory.sizes)
        return self.inventory.stages[place.stage], self._distribution.share(place)

    def _figures(self, settings: OffloadSettings) -> dict[RankPlace, RankFigures]:
        # Many ranks own the same shapes; each such list is planned once.
        planned: dict[object, RankFigures] = {}
        figures: dict[RankPlace, RankFigures] = {}
        for place in self._places:
            share = self._distribution.share(place)
            key = (
                tuple((tensor.shape, tensor.expert) for tensor in share.muon),
                share.adam_elements,
                share.held_elements,
            )
            if key not in planned:
                planned[key] = rank_figures(
                    share.muon,
                    held_elements=share.held_elements,
                    adam_elements=share.adam_elements,
                    settings=settings,
                    item_bytes=self._item_bytes,
                    bf16_gradients=has_flag(self._config, "grad_reduce_in_bf16"),
                    widened_at_once=has_flag(self._config, "log_num_zeros_in_grad")
                    or not self._config.megatron.param_layout,
                )
            figures[place] = planned[key]
        return figures

    def _node_totals(self, figures: dict[RankPlace, RankFigures]) -> tuple[NodeTotal, ...]:
        per_node = self._config.launcher.ranks_per_node
        of_rank = {rank: figures[place] for place, ranks in self._places.items() for rank in ranks}
        return tuple(
            _node_total(node, [of_rank[rank] for rank in range(node * per_node, (node + 1) * per_node)])
            for node in range(self._config.launcher.nodes)
        )

    def _largest(self, above_bytes: int) -> list[LargeParameter]:
        """Return Muon's parameters whose state is larger than `above_bytes`, the largest first."""
        counts: dict[tuple[str, tuple[int, ...], int], int] = {}
        for tensors in self.inventory.stages:
            for tensor in tensors:
                state = tensor.numel * self._item_bytes
                if tensor.optimizer is Optimizer.MUON and state > above_bytes:
                    key = (_NUMBER.sub("*", tensor.name), tensor.shape, state)
                    counts[key] = counts.get(key, 0) + tensor.parts
        return [
            LargeParameter(name=name, shape=shape, count=count, state_bytes=state)
            for (name, shape, state), count in sorted(counts.items(), key=lambda item: -item[0][2])
        ]


def _kinds(figures: dict[RankPlace, RankFigures], places: dict[RankPlace, list[int]]) -> tuple[RankKind, ...]:
    alike: dict[tuple[int, RankFigures], list[int]] = {}
    for place, ranks in places.items():
        alike.setdefault((place.stage, figures[place]), []).extend(ranks)
    kinds = [
        RankKind(ranks=tuple(sorted(ranks)), stage=stage, figures=own)
        for (stage, own), ranks in alike.items()
    ]

    def weight(kind: RankKind) -> tuple[int, ...]:
        own = kind.figures
        return (-own.disk_bytes, -own.host_bytes, -own.device_bytes, kind.ranks[0])

    return tuple(sorted(kinds, key=weight))


def _node_total(node: int, ranks: Iterable[RankFigures]) -> NodeTotal:
    own = list(ranks)
    return NodeTotal(
        node=node,
        disk_bytes=sum(rank.disk_bytes for rank in own),
        rank_disk_bytes=tuple(rank.disk_bytes for rank in own),
        host_bytes=sum(rank.host_bytes for rank in own),
        staging_bytes=sum(rank.staging_bytes for rank in own),
        device_bytes=sum(rank.stepping_bytes for rank in own),
        muon_state_bytes=sum(rank.muon_state_bytes for rank in own),
        each_way_bytes=sum(rank.each_way_bytes for rank in own),
        each_way_behind_bytes=sum(rank.each_way_behind_bytes for rank in own),
        open_files=sum(rank.open_files for rank in own),
        maps=sum(rank.maps for rank in own),
    )
