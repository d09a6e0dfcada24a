"""A parameter as the planner knows it, and how tensor parallelism cuts one."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass


class Optimizer(enum.StrEnum):
    """Which optimizer steps a parameter."""

    MUON = "muon"
    ADAM = "adam"


class Layers(enum.StrEnum):
    """What Megatron builds its layers from; they name and place norms differently."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One parameter of one rank.

    Attributes:
        name: Megatron's name of it, without the wrappers' ``module.``.
        shape: Local shape on the rank.
        optimizer: Who steps it.
        numel: Elements of the local shape.
        expert: It is reduced over the expert data-parallel group and owned by one of its ranks.
        parts: Ranks of its model-parallel group that hold different parts of the whole; 1: all hold the same.
        chunk: Number of the virtual pipeline stage on this rank that holds it.
        shared_embedding: The embedding that the first and the last pipeline stage keep equal.
    """

    name: str
    shape: tuple[int, ...]
    optimizer: Optimizer
    numel: int
    expert: bool = False
    parts: int = 1
    chunk: int = 0
    shared_embedding: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A parameter before it has a place: name within its layer, local shape, and into how many it is cut.

    Attributes:
        name: Relative to what holds it.
        shape: Local shape.
        parts: See `TensorInfo.parts`.
        embedding: An embedding or output weight, which Muon never steps.
        routed: It belongs to a routed expert.
    """

    name: str
    shape: tuple[int, ...]
    parts: int = 1
    embedding: bool = False
    routed: bool = False

    @property
    def optimizer(self) -> Optimizer:
        """Muon steps matrices that are no embeddings.

        Rule of ``is_managed_by_layer_wise_optimizer`` (megatron/core/optimizer/layer_wise_optimizer.py).
        """
        return Optimizer.MUON if len(self.shape) == 2 and not self.embedding else Optimizer.ADAM

    def below(self, prefix: str) -> Piece:
        """Return it under a longer name."""
        return Piece(
            name=f"{prefix}.{self.name}",
            shape=self.shape,
            parts=self.parts,
            embedding=self.embedding,
            routed=self.routed,
        )

    @property
    def numel(self) -> int:
        """Elements of the local shape."""
        return math.prod(self.shape)


def column_cut(name: str, rows: int, columns: int, tp: int, *, bias: bool) -> Iterator[Piece]:
    """Yield a weight whose output rows are shared out over `tp` ranks, and its bias."""
    yield Piece(name=f"{name}.weight", shape=(rows // tp, columns), parts=tp)
    if bias:
        yield Piece(name=f"{name}.bias", shape=(rows // tp,), parts=tp)


def row_cut(name: str, rows: int, columns: int, tp: int, *, bias: bool) -> Iterator[Piece]:
    """Yield a weight whose input columns are shared out over `tp` ranks, and its bias, which is not."""
    yield Piece(name=f"{name}.weight", shape=(rows, columns // tp), parts=tp)
    if bias:
        yield Piece(name=f"{name}.bias", shape=(rows,))


def norm(name: str, size: int, normalization: str) -> Iterator[Piece]:
    """Yield the vectors of a norm: LayerNorm has a bias, RMSNorm has none."""
    yield Piece(name=f"{name}.weight", shape=(size,))
    if normalization == "LayerNorm":
        yield Piece(name=f"{name}.bias", shape=(size,))


def fused_norm(name: str, size: int, normalization: str) -> Iterator[Piece]:
    """Yield the vectors of a norm that Transformer Engine keeps inside the linear layer behind it."""
    yield Piece(name=f"{name}.layer_norm_weight", shape=(size,))
    if normalization == "LayerNorm":
        yield Piece(name=f"{name}.layer_norm_bias", shape=(size,))
