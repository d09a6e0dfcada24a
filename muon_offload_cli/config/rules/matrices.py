"""The largest matrix that Muon steps, from the model's config. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from muon_offload_cli.config.rules.facts import ParameterFacts
from muon_offload_cli.config.rules.settings import in_range
from muon_offload_cli.config.rules.topology import topology_of
from muon_offload_cli.config.schema import Config
from muon_offload_cli.units import round_up

_STATE_ITEM_BYTES = 4
_STATE_ALIGNMENT = 512
"""Of the chunk plan (offload/plan.py): momentum and master are fp32, each aligned."""


def largest_matrix(config: Config) -> ParameterFacts | None:
    """Return the largest matrix that a rank holds of a layer, None if the sizes are no sizes.

    Attention of other kinds than grouped queries is not looked at: its matrices are smaller than the
    feed-forward ones of any published model.
    """
    sizes = topology_of(config)
    model = config.model
    numbers = (model.hidden_size, model.ffn_hidden_size, model.num_attention_heads, sizes.tp, sizes.etp)
    if not all(in_range(number, 1) for number in numbers):
        return None
    return max(
        (
            ParameterFacts(name=name, shape=(rows, columns), state_bytes=_state_bytes(rows * columns))
            for name, rows, columns in _matrices(config)
        ),
        key=lambda matrix: matrix.state_bytes,
    )


def _matrices(config: Config) -> Iterator[tuple[str, int, int]]:
    """Yield name, rows and columns of a layer's matrices (megatron/core/models/gpt/gpt_layer_specs.py)."""
    model, sizes = config.model, topology_of(config)
    hidden, heads = model.hidden_size, model.num_attention_heads
    head = model.kv_channels or hidden // heads
    groups = model.num_query_groups or heads
    gated = 2 if model.swiglu else 1
    yield "self_attention.linear_qkv.weight", (heads + 2 * groups) * head // sizes.tp, hidden
    yield "self_attention.linear_proj.weight", hidden, heads * head // sizes.tp
    moe = model.moe
    if moe.num_experts is None or moe.layer_freq not in (None, "1"):
        yield "mlp.linear_fc1.weight", model.ffn_hidden_size * gated // sizes.tp, hidden
        yield "mlp.linear_fc2.weight", hidden, model.ffn_hidden_size // sizes.tp
    if moe.num_experts is None:
        return
    expert = moe.ffn_hidden_size or model.ffn_hidden_size
    yield "mlp.router.weight", moe.num_experts, hidden
    yield "mlp.experts.linear_fc1.weight", expert * gated // sizes.etp, hidden
    yield "mlp.experts.linear_fc2.weight", hidden, expert // sizes.etp
    if moe.shared_expert_ffn_hidden_size:
        shared = moe.shared_expert_ffn_hidden_size
        yield "mlp.shared_experts.linear_fc1.weight", shared * gated // sizes.tp, hidden
        yield "mlp.shared_experts.linear_fc2.weight", hidden, shared // sizes.tp


def _state_bytes(numel: int) -> int:
    return 2 * round_up(numel * _STATE_ITEM_BYTES, _STATE_ALIGNMENT)
