"""Shrinking an architecture: narrow, shallow and with few experts, but with a layer of every kind. Pure."""

from __future__ import annotations

import ast
import copy
import math

from muon_offload_cli.config.model_schema import ModelConfig, MoeConfig
from muon_offload_cli.config.schema import Config, DataSource, ParallelConfig

HIDDEN = 128
HEAD = 32
FFN = 256
EXPERT_FFN = 64
LATENT = 32
VOCABULARY = 512
"""Holds the 257 tokens of byte data."""


def shrink_model(config: Config) -> tuple[ModelConfig, ParallelConfig]:
    """Return a small model of the same kinds of layers, and its cut into pipeline stages.

    Args:
        config: A run whose parallel sizes are final; it is not changed.
    """
    model, parallel = copy.deepcopy(config.model), copy.deepcopy(config.parallel)
    # Weights of the real size fit no small model.
    model.from_hf = None
    _shrink_depth(model, parallel)
    _shrink_attention(model, parallel)
    model.ffn_hidden_size = _multiple(FFN, parallel.tp)
    if model.moe.num_experts is not None:
        _shrink_experts(model.moe, parallel)
    if config.data.source is not DataSource.indexed and model.vocab_size is not None:
        # A prepared set may hold any token of the real vocabulary.
        model.vocab_size = min(model.vocab_size, VOCABULARY)
    return model, parallel


def layers_with_experts(model: ModelConfig) -> list[int]:
    """Return 1 for each layer that has experts, as Megatron reads `moe.layer_freq`."""
    layers = model.num_layers
    if model.moe.num_experts is None:
        return [0] * layers
    text = model.moe.layer_freq or "1"
    return pattern(text) if "[" in text else [int(i % int(text) == 0) for i in range(layers)]


def layers_with_linear_attention(model: ModelConfig) -> list[int]:
    """Return 1 for each layer with linear attention, as Megatron reads `linear_attention_freq`."""
    layers = model.num_layers
    if model.experimental_attention_variant is None or model.linear_attention_freq is None:
        return [0] * layers
    text = model.linear_attention_freq
    return pattern(text) if "[" in text else [int((i + 1) % int(text) != 0) for i in range(layers)]


def pattern(text: str) -> list[int]:
    """Return the list that sums and products of lists describe: ``([0]*1+[1]*3)``.

    Raises:
        ValueError: It is none.
    """
    return _evaluate(ast.parse(text, mode="eval").body)


def _evaluate(node: ast.expr) -> list[int]:
    match node:
        case ast.List():
            return [int(value) for value in ast.literal_eval(node)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            return _evaluate(left) * times
    raise ValueError(f"{ast.unparse(node)} is no list of layers")


def _shrink_depth(model: ModelConfig, parallel: ParallelConfig) -> None:
    experts, linear = layers_with_experts(model), layers_with_linear_attention(model)
    dense_first = min(1, experts.index(1)) if 1 in experts else 0
    kinds = set(zip(experts[experts.index(1) if dense_first else 0 :], linear, strict=False))
    # Behind the dense layers the pattern repeats; one period of it shows every kind.
    period, seen = 0, set[tuple[int, int]]()
    while seen != kinds:
        at = period + (experts.index(1) if dense_first else 0)
        seen.add((experts[at], linear[period]))
        period += 1
    layers = _stages(parallel, max(2, dense_first + period), mtp=bool(model.mtp_num_layers))
    model.num_layers = min(layers, len(experts)) if parallel.pp == 1 else layers
    if dense_first:
        model.moe.layer_freq = f"([0]*1+[1]*{model.num_layers - 1})"
    elif model.moe.layer_freq and "[" in model.moe.layer_freq:
        model.moe.layer_freq = _cycled(experts, model.num_layers)
    if model.linear_attention_freq and "[" in model.linear_attention_freq:
        model.linear_attention_freq = _cycled(linear, model.num_layers)


def _cycled(layers: list[int], length: int) -> str:
    return str([layers[i % len(layers)] for i in range(length)])


def _stages(parallel: ParallelConfig, needed: int, *, mtp: bool) -> int:
    """Cut the smallest number of layers that is at least `needed` as the run's pipeline is cut."""
    pp = parallel.pp
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if pp == 1:
        parallel.decoder_first_pipeline_num_layers = parallel.decoder_last_pipeline_num_layers = None
        parallel.num_virtual_stages_per_pipeline_rank = parallel.pipeline_model_parallel_layout = None
        return needed
    if parallel.pipeline_model_parallel_layout is not None:
        parallel.pipeline_model_parallel_layout = _layout(pp, needed, mtp=mtp)
        return parallel.pipeline_model_parallel_layout.count("t")
    virtual = min(2, parallel.num_virtual_stages_per_pipeline_rank or 1)
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        parallel.num_virtual_stages_per_pipeline_rank = virtual
    if first is None and last is None:
        return _multiple(needed, pp * virtual)
    short = max(1, math.ceil(needed / pp) - 1) * virtual
    sizes = [short + virtual] * pp
    if first is not None:
        sizes[0] = parallel.decoder_first_pipeline_num_layers = short
    if last is not None and (first is None or pp > 2):
        sizes[-1] = short
    if last is not None:
        parallel.decoder_last_pipeline_num_layers = sizes[-1]
    return sum(sizes)


def _layout(pp: int, needed: int, *, mtp: bool) -> str:
    """Write two chunks a pipeline rank: the embedding's, decoder chunks, the further token's, the loss's."""
    ends = ["m", "L"] if mtp else ["L"]
    chunks = 2 * pp - 1 - len(ends)
    each = max(1, math.ceil((needed - 1) / chunks))
    return "|".join(["Et", *["t" * each] * chunks, *ends])


def _shrink_attention(model: ModelConfig, parallel: ParallelConfig) -> None:
    tp, parts = parallel.tp, parallel.tp * parallel.cp
    if model.multi_latent_attention:
        model.num_attention_heads = 2 * parts
        model.q_lora_rank = None if model.q_lora_rank is None else 2 * LATENT
        model.kv_lora_rank = LATENT
        model.qk_head_dim = model.v_head_dim = HEAD
        model.qk_pos_emb_head_dim = HEAD // 2
    else:
        groups = model.num_query_groups or model.num_attention_heads
        ratio = min(2, model.num_attention_heads // groups)
        few = tp * min(2, max(1, groups // tp))
        model.num_attention_heads = few * ratio
        model.num_query_groups = None if model.num_query_groups is None else few
        model.kv_channels = None if model.kv_channels is None else HEAD
    model.hidden_size = max(HIDDEN, HEAD // 2 * model.num_attention_heads)
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if model.experimental_attention_variant is not None and keys and values:
        model.linear_num_key_heads = parts * min(2, max(1, keys // parts))
        model.linear_num_value_heads = model.linear_num_key_heads * min(2, values // keys)
        model.linear_key_head_dim = model.linear_value_head_dim = HEAD


def _shrink_experts(moe: MoeConfig, parallel: ParallelConfig) -> None:
    etp = parallel.tp if parallel.etp is None else parallel.etp
    moe.topk = min(2, moe.topk)
    if moe.router_num_groups and moe.router_num_groups > 1:
        limited = moe.router_group_topk is not None and moe.router_group_topk < moe.router_num_groups
        moe.router_num_groups, moe.router_group_topk = 2, 1 if limited else 2
    unit = math.lcm(parallel.ep, moe.router_num_groups or 1)
    moe.num_experts = min(moe.num_experts or unit, _multiple(max(2 * parallel.ep, 4), unit))
    moe.ffn_hidden_size = None if moe.ffn_hidden_size is None else _multiple(EXPERT_FFN, etp)
    if moe.shared_expert_ffn_hidden_size is not None:
        moe.shared_expert_ffn_hidden_size = _multiple(EXPERT_FFN, parallel.tp)
    # A kernel of Transformer Engine's.
    moe.grouped_gemm = False


def _multiple(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
