"""Every parameter of a rank, with name, local shape and optimizer, in Megatron's order.

The parameters of a rank depend on its pipeline stage alone: tensor- and expert-parallel peers hold other parts
of the same shapes, data-parallel peers the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muon_offload_cli.config.rules.family import is_muon
from muon_offload_cli.config.rules.topology import topology_of
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.vocabulary import vocabulary_size
from muon_offload_cli.planner.layer import LayerBuild, layer_pieces
from muon_offload_cli.planner.pattern import moe_layers
from muon_offload_cli.planner.pipeline import ModelChunk, argument, model_chunks
from muon_offload_cli.planner.tensors import Layers, Optimizer, Piece, TensorInfo, norm
from muon_offload_cli.topology import Topology
from muon_offload_cli.units import round_up

VOCABULARY_MULTIPLE = 128
"""Megatron pads a vocabulary to this times tp (--make-vocab-size-divisible-by)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All parameters of a model as its ranks hold them.

    Attributes:
        sizes: Parallel sizes.
        stages: Parameters of each pipeline stage, in the order of ``named_parameters()`` over its chunks.
    """

    sizes: Topology
    stages: tuple[tuple[TensorInfo, ...], ...]

    def parameters(self, optimizer: Optimizer | None = None) -> int:
        """Count the elements of the whole model, each once; of one optimizer if given."""
        total = 0
        for tensors in self.stages:
            total += whole_elements(t for t in tensors if optimizer in (None, t.optimizer))
        # The last stage's copy of a tied embedding is the same parameter.
        copies = [t for tensors in self.stages[1:] for t in tensors if t.shared_embedding]
        return total - (whole_elements(copies) if optimizer is not Optimizer.MUON else 0)


def whole_elements(tensors: Iterator[TensorInfo] | Sequence[TensorInfo]) -> int:
    """Count elements over all parts of each tensor."""
    return sum(tensor.numel * tensor.parts for tensor in tensors)


def take_inventory(config: Config, layers: Layers) -> Inventory:
    """List the parameters of every pipeline stage.

    Args:
        config: A run that the rules accept.
        layers: What Megatron will build its layers from.

    Raises:
        UserError: The layers cannot be shared out over the pipeline, or a layer pattern cannot be read.
    """
    sizes = topology_of(config)
    model = config.model
    if model.moe.num_experts is None:
        pattern = [False] * model.num_layers
    else:
        pattern = moe_layers(model.moe.layer_freq, model.num_layers)
    build = LayerBuild(model=model, sizes=sizes, layers=layers)
    kinds = {kind: tuple(layer_pieces(build, moe=kind)) for kind in set(pattern)}
    # Experts use their own groups where those differ from the dense ones (megatron/core/tensor_parallel/layers.py,
    # use_expert_pgs).
    own_groups = sizes.ep > 1 or sizes.etp != sizes.tp
    muon = is_muon(config.optimizer)
    stages = []
    for chunks in model_chunks(config):
        tensors: list[TensorInfo] = []
        for number, chunk in enumerate(chunks):
            for piece in _chunk_pieces(config, chunk, kinds, pattern, sizes):
                tensors.append(
                    TensorInfo(
                        name=piece.name,
                        shape=piece.shape,
                        optimizer=piece.optimizer if muon else Optimizer.ADAM,
                        numel=piece.numel,
                        expert=piece.routed and own_groups,
                        parts=piece.parts,
                        chunk=number,
                        shared_embedding=piece.embedding and model.tied_embeddings and sizes.pp > 1,
                    )
                )
        stages.append(tuple(tensors))
    return Inventory(sizes=sizes, stages=tuple(stages))


def _chunk_pieces(
    config: Config,
    chunk: ModelChunk,
    kinds: dict[bool, tuple[Piece, ...]],
    pattern: Sequence[bool],
    sizes: Topology,
) -> Iterator[Piece]:
    model = config.model
    multiple = int(argument(config, "make_vocab_size_divisible_by") or VOCABULARY_MULTIPLE) * sizes.tp
    rows = round_up(vocabulary_size(config), multiple) // sizes.tp
    shape = (rows, model.hidden_size)
    if chunk.first:
        yield Piece(name="embedding.word_embeddings.weight", shape=shape, parts=sizes.tp, embedding=True)
    for local, layer in enumerate(chunk.layers):
        for piece in kinds[pattern[layer]]:
            yield piece.below(f"decoder.layers.{local}")
    if chunk.last:
        yield from (
            piece.below("decoder")
            for piece in norm("final_layernorm", model.hidden_size, model.normalization)
        )
        if not (model.tied_embeddings and chunk.first):
            yield Piece(name="output_layer.weight", shape=shape, parts=sizes.tp, embedding=True)
