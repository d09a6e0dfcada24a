"""The parameters of one transformer layer on one rank, in the order in which Megatron registers them.

Sources: megatron/core/transformer/{transformer_layer,mlp,multi_token_prediction}.py and moe/{moe_layer,
experts,router,shared_experts}.py of megatron-core 0.19.2. A module's own parameters come before those of its
children.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muon_offload_cli.config.model_schema import ModelConfig
from muon_offload_cli.planner.attention import attention, gated_delta_net, norm_is_fused
from muon_offload_cli.planner.tensors import Layers, Piece, column_cut, fused_norm, norm, row_cut
from muon_offload_cli.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBuild:
    """What a layer is built from.

    Attributes:
        model: The architecture.
        sizes: Parallel sizes.
        layers: Whose modules.
    """

    model: ModelConfig
    sizes: Topology
    layers: Layers


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What tells the layers of a model apart.

    Attributes:
        moe: The feed-forward part is a mixture of experts.
        linear: Attention is linear.
    """

    moe: bool
    linear: bool


def layer_pieces(build: LayerBuild, kind: LayerKind) -> Iterator[Piece]:
    """Yield the parameters of a layer of one kind."""
    model, tp = build.model, build.sizes.tp
    if not norm_is_fused(model, build.layers, linear=kind.linear):
        yield from norm("input_layernorm", model.hidden_size, model.normalization)
    make = gated_delta_net if kind.linear else attention
    for piece in make(model, tp, build.layers):
        yield piece.below("self_attention")
    # Transformer Engine fuses this norm into the feed-forward part of a dense layer only.
    if kind.moe or build.layers is not Layers.TRANSFORMER_ENGINE:
        yield from norm("pre_mlp_layernorm", model.hidden_size, model.normalization)
    for piece in _experts_layer(build) if kind.moe else _dense(build):
        yield piece.below("mlp")


def further_token_pieces(build: LayerBuild, kind: LayerKind) -> Iterator[Piece]:
    """Yield a layer that predicts a further token: two norms, their projection, a layer of `kind`, a norm."""
    model = build.model
    yield from norm("enorm", model.hidden_size, model.normalization)
    yield from norm("hnorm", model.hidden_size, model.normalization)
    yield from column_cut("eh_proj", model.hidden_size, 2 * model.hidden_size, build.sizes.tp, bias=False)
    for piece in layer_pieces(build, kind):
        yield piece.below("mtp_model_layer")
    yield from norm("final_layernorm", model.hidden_size, model.normalization)


def _dense(build: LayerBuild) -> Iterator[Piece]:
    model = build.model
    if build.layers is Layers.TRANSFORMER_ENGINE:
        yield from fused_norm("linear_fc1", model.hidden_size, model.normalization)
    yield from _feed_forward(model, model.ffn_hidden_size, build.sizes.tp)


def _feed_forward(model: ModelConfig, size: int, tp: int) -> Iterator[Piece]:
    # SwiGLU's gate and value lie in one matrix.
    rows = size * (2 if model.swiglu else 1)
    yield from column_cut("linear_fc1", rows, model.hidden_size, tp, bias=model.add_bias_linear)
    yield from row_cut("linear_fc2", model.hidden_size, size, tp, bias=model.add_bias_linear)


def _experts_layer(build: LayerBuild) -> Iterator[Piece]:
    model, moe = build.model, build.model.moe
    experts = moe.num_experts or 0
    yield Piece(name="router.weight", shape=(experts, model.hidden_size))
    if model.add_bias_linear:
        yield Piece(name="router.bias", shape=(experts,))
    for piece in _routed(build, experts // build.sizes.ep):
        yield piece.below("experts")
    if moe.shared_expert_ffn_hidden_size:
        if moe.shared_expert_gate:
            yield Piece(name="shared_experts.gate_weight", shape=(1, model.hidden_size))
        for piece in _feed_forward(model, moe.shared_expert_ffn_hidden_size, build.sizes.tp):
            yield piece.below("shared_experts")


def _routed(build: LayerBuild, local: int) -> Iterator[Piece]:
    """Yield the local experts: one after another, or matrix by matrix where they are grouped."""
    model, sizes = build.model, build.sizes
    size = model.moe.ffn_hidden_size or model.ffn_hidden_size
    one = [
        Piece(name=piece.name, shape=piece.shape, parts=piece.parts * sizes.ep, routed=True)
        for piece in _feed_forward(model, size, sizes.etp)
    ]
    # Grouped kernels are Transformer Engine's; local layers hold one expert after another.
    if model.moe.grouped_gemm and build.layers is Layers.TRANSFORMER_ENGINE:
        for piece in one:
            for index in range(local):
                yield Piece(name=f"{piece.name}{index}", shape=piece.shape, parts=piece.parts, routed=True)
        return
    for index in range(local):
        for piece in one:
            yield piece.below(f"local_experts.{index}")
