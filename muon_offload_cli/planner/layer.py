"""The parameters of one transformer layer on one rank, in the order in which Megatron registers them.

Sources: megatron/core/transformer/{transformer_layer,attention,mlp}.py, moe/{moe_layer,experts,router,
shared_experts}.py, of megatron-core 0.19.2. A module's own parameters come before those of its children.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muon_offload_cli.config.schema import ModelConfig
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

    @property
    def fused(self) -> bool:
        """Norms before a linear layer live inside it."""
        return self.layers is Layers.TRANSFORMER_ENGINE


def layer_pieces(build: LayerBuild, *, moe: bool) -> Iterator[Piece]:
    """Yield a layer's parameters.

    Args:
        build: What it is built from.
        moe: Its feed-forward part is a mixture of experts.
    """
    model = build.model
    if not build.fused:
        yield from norm("input_layernorm", model.hidden_size, model.normalization)
    for piece in _attention(build):
        yield piece.below("self_attention")
    # Transformer Engine fuses this norm into the feed-forward part of a dense layer only.
    if moe or not build.fused:
        yield from norm("pre_mlp_layernorm", model.hidden_size, model.normalization)
    for piece in _experts_layer(build) if moe else _dense(build):
        yield piece.below("mlp")


def _attention(build: LayerBuild) -> Iterator[Piece]:
    model, tp = build.model, build.sizes.tp
    heads = model.num_attention_heads
    head_size = model.kv_channels or model.hidden_size // heads
    groups = model.num_query_groups or heads
    bias = model.add_bias_linear
    yield from row_cut("linear_proj", model.hidden_size, heads * head_size, tp, bias=bias)
    if build.fused:
        yield from fused_norm("linear_qkv", model.hidden_size, model.normalization)
    yield from column_cut("linear_qkv", (heads + 2 * groups) * head_size, model.hidden_size, tp, bias=bias)
    if model.qk_layernorm:
        yield from norm("q_layernorm", head_size, model.normalization)
        yield from norm("k_layernorm", head_size, model.normalization)


def _dense(build: LayerBuild) -> Iterator[Piece]:
    model = build.model
    if build.fused:
        yield from fused_norm("linear_fc1", model.hidden_size, model.normalization)
    yield from _feed_forward(model, model.ffn_hidden_size, build.sizes.tp)


def _feed_forward(model: ModelConfig, size: int, tp: int) -> Iterator[Piece]:
    yield from _up(model, size, tp)
    yield from row_cut("linear_fc2", model.hidden_size, size, tp, bias=model.add_bias_linear)


def _up(model: ModelConfig, size: int, tp: int) -> Iterator[Piece]:
    # SwiGLU's gate and value lie in one matrix.
    rows = size * (2 if model.swiglu else 1)
    yield from column_cut("linear_fc1", rows, model.hidden_size, tp, bias=model.add_bias_linear)


def _experts_layer(build: LayerBuild) -> Iterator[Piece]:
    model, moe = build.model, build.model.moe
    experts = moe.num_experts or 0
    yield Piece(name="router.weight", shape=(experts, model.hidden_size))
    if model.add_bias_linear:
        yield Piece(name="router.bias", shape=(experts,))
    for piece in _routed(build, experts // build.sizes.ep):
        yield piece.below("experts")
    if moe.shared_expert_ffn_hidden_size:
        for piece in _feed_forward(model, moe.shared_expert_ffn_hidden_size, build.sizes.tp):
            yield piece.below("shared_experts")


def _routed(build: LayerBuild, local: int) -> Iterator[Piece]:
    """Yield the local experts: one after another, or matrix by matrix where they are grouped."""
    model, sizes = build.model, build.sizes
    size = model.moe.ffn_hidden_size or model.ffn_hidden_size
    one = [
        Piece(name=piece.name, shape=piece.shape, parts=sizes.etp * sizes.ep, routed=True)
        for piece in _feed_forward(model, size, sizes.etp)
    ]
    if model.moe.grouped_gemm:
        for piece in one:
            for index in range(local):
                yield Piece(name=f"{piece.name}{index}", shape=piece.shape, parts=piece.parts, routed=True)
        return
    for index in range(local):
        for piece in one:
            yield piece.below(f"local_experts.{index}")
