"""Facts of the model that contradict each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

from muon_offload_cli.config.keys import nearest
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.registry import rule
from muon_offload_cli.config.rules.settings import count_of, has_flag, in_range
from muon_offload_cli.config.rules.topology import largest_divisor, length_step
from muon_offload_cli.config.schema import Config, Device
from muon_offload_cli.errors import Level, Problem
from muon_offload_cli.units import round_up

# --moe-router-load-balancing-type of megatron/training/arguments.py.
LOAD_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
# Flags that make rotary positions reach further than they were trained for.
STRETCHES = ("rotary_seq_len_interpolation_factor", "use_rope_scaling")
# A pattern has an entry or a product for each layer; more is no pattern.
MAX_PATTERN = 4000


@rule(name="head-size", reason="Without kv_channels the hidden size is cut into heads evenly.")
def head_size(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse heads that do not divide the hidden size."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels is None and hidden >= 1 and heads >= 1 and hidden % heads:
        yield Problem(
            what=f"model.hidden_size={hidden} is not a multiple of model.num_attention_heads={heads}, "
            "and model.kv_channels is not set.",
            # An even number of channels a head, of which rotary positions turn pairs.
            fix=f"model.hidden_size={round_up(hidden, 2 * heads)}",
            keys=("model.hidden_size", "model.num_attention_heads", "model.kv_channels"),
        )


@rule(name="query-groups", reason="Each query group serves the same number of heads.")
def query_groups(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse query groups that do not divide the heads."""
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    if groups is not None and groups >= 1 and heads >= 1 and heads % groups:
        yield Problem(
            what=f"model.num_attention_heads={heads} is not a multiple of model.num_query_groups={groups}.",
            fix=f"model.num_query_groups={largest_divisor(heads, groups)}",
            keys=("model.num_attention_heads", "model.num_query_groups"),
        )


@rule(
    name="context",
    reason="Rotary positions go on for ever, but weights know only those that they were trained on.",
)
def context(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of sequences that are longer than what the model was published for."""
    length, positions = config.train.sequence_length, config.model.max_position_embeddings
    stretched = any(has_flag(config, flag) for flag in STRETCHES)
    if positions is None or not 1 <= positions < length or stretched:
        return
    key, step = "model.max_position_embeddings", length_step(config.parallel)
    yield Problem(
        what=f"train.sequence_length={length} is longer than {key}={positions}, for which the model was "
        "published.",
        fix=f"train.sequence_length={positions // step * step}"
        if positions >= step
        else "a layout with less parallel.tp and parallel.cp: they divide the sequence",
        keys=("train.sequence_length", key),
        level=Level.WARNING,
    )


@rule(name="top-k", reason="A token cannot visit more experts than there are.")
def top_k(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a top-k beyond the number of experts."""
    moe = config.model.moe
    if moe.num_experts is not None and 1 <= moe.num_experts < moe.topk:
        yield Problem(
            what=f"model.moe.topk={moe.topk}, and model.moe.num_experts={moe.num_experts}.",
            fix=f"model.moe.topk={moe.num_experts}",
            keys=("model.moe.topk", "model.moe.num_experts"),
        )


@rule(name="normalization", reason="Megatron's local layers have two kinds of norm.")
def normalization(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a norm that Megatron does not have."""
    if config.model.normalization not in ("RMSNorm", "LayerNorm"):
        yield Problem(
            what=f"model.normalization={config.model.normalization} is neither RMSNorm nor LayerNorm.",
            fix="model.normalization=RMSNorm",
            keys=("model.normalization",),
        )


@rule(name="head-width", reason="Heads wider or narrower than hidden size over heads are rarely meant.")
def head_width(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Warn of a head size that a person wrote and that does not give the hidden size."""
    model = config.model
    width, hidden, heads = model.kv_channels, model.hidden_size, model.num_attention_heads
    if width is None or "model.kv_channels" not in written or min(width, hidden, heads) < 1:
        return
    if width * heads != hidden:
        yield Problem(
            what=f"model.kv_channels={width} x model.num_attention_heads={heads} is {width * heads}, and "
            f"model.hidden_size={hidden}.",
            fix="model.kv_channels=null" if hidden % heads == 0 else f"model.hidden_size={width * heads}",
            keys=("model.kv_channels", "model.num_attention_heads", "model.hidden_size"),
            level=Level.WARNING,
        )


@rule(name="rotary-size", reason="Rotary positions turn pairs of a head's channels.")
def rotary_size(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a rotated part of a head that is empty or odd."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.multi_latent_attention or not (
        in_range(hidden, 1) and in_range(heads, 1) and in_range(model.rotary_percent, 0, 1)
    ):
        return
    width = model.kv_channels if model.kv_channels is not None else hidden // heads
    rotated = int(width * model.rotary_percent)
    if width >= 1 and model.rotary_percent > 0 and (rotated < 2 or rotated % 2):
        yield Problem(
            what=f"model.rotary_percent={model.rotary_percent:g} of a head of {width} channels are "
            f"{rotated}, and rotary positions need pairs.",
            fix="model.rotary_percent=1.0"
            if width % 2 == 0
            else f"model.kv_channels={width + 1} model.rotary_percent=1.0",
            keys=("model.rotary_percent", "model.kv_channels"),
        )


@rule(name="load-balancing", reason="Megatron's router has these ways to keep its experts busy.")
def load_balancing(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a way that Megatron does not have, and a loss next to one that takes none."""
    moe = config.model.moe
    if moe.num_experts is None:
        return
    if moe.load_balancing not in LOAD_BALANCING:
        near = nearest(moe.load_balancing, LOAD_BALANCING, count=1) or ["aux_loss"]
        yield Problem(
            what=f"model.moe.load_balancing={moe.load_balancing[:80]} is none of "
            f"{', '.join(LOAD_BALANCING)}.",
            fix=f"model.moe.load_balancing={near[0]}",
            keys=("model.moe.load_balancing",),
        )
    elif moe.load_balancing == "none" and moe.aux_loss_coeff and "model.moe.aux_loss_coeff" in written:
        yield Problem(
            what=f"model.moe.aux_loss_coeff={moe.aux_loss_coeff:g}, and model.moe.load_balancing=none never "
            "reads it.",
            fix="model.moe.aux_loss_coeff=0.0",
            keys=("model.moe.aux_loss_coeff", "model.moe.load_balancing"),
        )


@rule(
    name="expert-layers",
    reason="Megatron reads which layers have experts from a number or a list of 0 and 1.",
)
def expert_layers(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse a pattern that cannot be read or describes another number of layers."""
    text, layers = config.model.moe.layer_freq, config.model.num_layers
    if config.model.moe.num_experts is None or text is None or layers < 1:
        return
    if "[" not in text:
        if (count_of(text) or 0) < 1:
            yield Problem(
                what=f"model.moe.layer_freq={text[:80]} is neither a number of 1 or more nor a list.",
                fix="model.moe.layer_freq=1",
                keys=("model.moe.layer_freq",),
            )
        return
    length = pattern_length(text)
    if length != layers:
        told = "cannot be read" if length is None else f"describes {length} layers"
        yield Problem(
            what=f"model.moe.layer_freq={text[:80]} {told}, and model.num_layers={layers}.",
            fix=f"'model.moe.layer_freq=\"([1]*{layers})\"'",
            keys=("model.moe.layer_freq", "model.num_layers"),
        )


@rule(
    name="grouped-gemm", reason="The grouped kernel is CUDA's, and Megatron asks the GPU for it at start-up."
)
def grouped_gemm(config: Config, written: Set[str], facts: MachineFacts) -> Iterator[Problem]:
    """Refuse grouped experts on CPU ranks."""
    moe = config.model.moe
    if config.device is Device.cpu and moe.num_experts is not None and moe.grouped_gemm:
        yield Problem(
            what="model.moe.grouped_gemm=true, and device=cpu has no such kernel.",
            fix="model.moe.grouped_gemm=false",
            keys=("model.moe.grouped_gemm", "device"),
        )


def pattern_length(text: str) -> int | None:
    """Return how many layers a pattern such as ``([0]*1+[1]*26)`` describes, without building the list.

    Returns:
        None if it is none, or holds other entries than 0 and 1.
    """
    try:
        return _length(ast.parse(text, mode="eval").body) if len(text) <= MAX_PATTERN else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _length(node: ast.expr) -> int | None:
    if isinstance(node, ast.List):
        plain = all(isinstance(item, ast.Constant) and item.value in (0, 1) for item in node.elts)
        return len(node.elts) if plain else None
    if not isinstance(node, ast.BinOp):
        return None
    if isinstance(node.op, ast.Add):
        left, right = _length(node.left), _length(node.right)
        return None if left is None or right is None else left + right
    if isinstance(node.op, ast.Mult):
        for pattern, factor in ((node.left, node.right), (node.right, node.left)):
            times = factor.value if isinstance(factor, ast.Constant) else None
            if type(times) is int and (length := _length(pattern)) is not None:
                return length * max(times, 0)
    return None
