"""Every parameter of a rank, with name, local shape and optimizer, in Megatron's order.

The parameters of a rank depend on its pipeline stage alone: tensor- and expert-parallel peers hold other
parts of the same shapes, data-parallel peers the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muon_offload_cli.config.rules.family import is_muon
from muon_offload_cli.config.rules.topology import topology_of
from muon_offload_cli.config.schema import Config
from muon_offload_cli.config.vocabulary import vocabulary_size
from muon_offload_cli.errors import wrong
from muon_offload_cli.planner.layer import LayerBuild, LayerKind, further_token_pieces, layer_pieces
from muon_offload_cli.planner.pattern import linear_layers, moe_layers
from muon_offload_cli.planner.pipeline import ModelChunk, argument, model_chunks
from muon_offload_cli.planner.tensors import Layers, Optimizer, Piece, TensorInfo, norm
from muon_offload_cli.topology import Topology
from muon_offload_cli.units import round_up


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
        # Copies of a shared embedding in later stages are the same parameter.
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
    kinds = _layer_kinds(config)
    build = LayerBuild(model=model, sizes=sizes, layers=layers)
    pieces = {kind: tuple(layer_pieces(build, kind)) for kind in set(kinds)}
    further = tuple(further_token_pieces(build, kinds[-1])) if model.mtp_num_layers else ()
    # Experts use their own groups where those differ from the dense ones (use_expert_pgs in
    # megatron/core/tensor_parallel/layers.py).
    own_groups = sizes.ep > 1 or sizes.etp != sizes.tp
    muon = is_muon(config.optimizer)
    shares = sizes.pp > 1 and (model.tied_embeddings or bool(model.mtp_num_layers))
    stages = []
    for chunks in model_chunks(config):
        tensors: list[TensorInfo] = []
        for number, chunk in enumerate(chunks):
            decoder = [pieces[kinds[layer]] for layer in chunk.layers]
            for piece in _chunk_pieces(config, chunk, decoder, further, sizes):
                tensors.append(
                    TensorInfo(
                        name=piece.name,
                        shape=piece.shape,
                        optimizer=piece.optimizer if muon else Optimizer.ADAM,
                        numel=piece.numel,
                        expert=piece.routed and own_groups,
                        parts=piece.parts,
                        chunk=number,
                        shared_embedding=shares and _is_shared(config, chunk, piece),
                    )
                )
        stages.append(tuple(tensors))
    return Inventory(sizes=sizes, stages=tuple(stages))


def _layer_kinds(config: Config) -> list[LayerKind]:
    """Return the kind of each decoder layer."""
    model = config.model
    if model.moe.num_experts is None:
        moe = [False] * model.num_layers
    else:
        moe = moe_layers(model.moe.layer_freq, model.num_layers)
    if model.experimental_attention_variant is None:
        linear = [False] * model.num_layers
    elif model.experimental_attention_variant == "gated_delta_net":
        linear = linear_layers(model.linear_attention_freq, model.num_layers)
    else:
        key = "model.experimental_attention_variant"
        what = f"{key}={model.experimental_attention_variant} is not planned."
        raise wrong(what, f"{key}=gated_delta_net", key)
    return [LayerKind(moe=a, linear=b) for a, b in zip(moe, linear, strict=True)]


def _is_shared(config: Config, chunk: ModelChunk, piece: Piece) -> bool:
    """Tell whether stages keep this weight equal to the first stage's embedding.

    Rule of ``setup_embeddings_and_output_layer`` in megatron/core/models/common/language_module.
    """
    if not piece.embedding:
        return False
    if piece.name.startswith("embedding"):
        return True
    return config.model.tied_embeddings and not chunk.further


def _chunk_pieces(
    config: Config,
    chunk: ModelChunk,
    decoder: Sequence[Sequence[Piece]],
    further: Sequence[Piece],
    sizes: Topology,
) -> Iterator[Piece]:
    model = config.model
    multiple = int(argument(config, "make_vocab_size_divisible_by") or model.make_vocab_size_divisible_by)
    rows = round_up(vocabulary_size(config), multiple * sizes.tp) // sizes.tp
    shape = (rows, model.hidden_size)
    # Further-token layers embed the tokens that they look ahead at.
    if chunk.first or chunk.further:
        yield Piece(name="embedding.word_embeddings.weight", shape=shape, parts=sizes.tp, embedding=True)
    for local, layer in enumerate(decoder):
        for piece in layer:
            yield piece.below(f"decoder.layers.{local}")
    if chunk.norm:
        for piece in norm("final_layernorm", model.hidden_size, model.normalization):
            yield piece.below("decoder")
    for local in range(chunk.further):
        for piece in further:
            yield piece.below(f"mtp.layers.{local}")
    if chunk.last and not (model.tied_embeddings and chunk.first):
        yield Piece(name="output_layer.weight", shape=shape, parts=sizes.tp, embedding=True)
