"""The architectures of Hugging Face models that Megatron is told of here, in the names of our model keys.

What each class of transformers takes where its config says nothing is in ``modeling_*.py`` and
``configuration_*.py`` below ``src/transformers/models``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muon_offload_cli.config.hf_file import CORRECT, KEY, HfFile
from muon_offload_cli.config.rules.settings import LARGEST
from muon_offload_cli.errors import Problem, UserError

MOST_LAYERS = 4000
"""As many as the rules take patterns of; no model comes near."""

YARN_ORIGINAL_POSITIONS = 4096
"""Megatron's, for which it has no flag (``original_max_position_embeddings`` of MLATransformerConfig)."""


@dataclass(kw_only=True, slots=True)
class Architecture:
    """What a file says, by key of ours below ``model.``.

    Attributes:
        fixed: Values that weights of the model need; another one is a contradiction.
        advised: Values of training, or of kernels, for whoever gives none.
        names: Where each stands in the file, by key.
        released: Values in which releases of one architecture differ: they go before those of a part.
    """

    fixed: dict[str, Any] = field(default_factory=dict)
    advised: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    released: dict[str, Any] = field(default_factory=dict)

    def take(self, key: str, value: Any, name: str) -> None:
        """Note a value that weights need, and its name in the file."""
        self.fixed[key] = value
        self.names[key] = name


def read_architecture(file: HfFile) -> Architecture:
    """Return the architecture that a ``config.json`` describes.

    Raises:
        UserError: The kind of model is not known here, or values are missing, malformed or cannot be built.
    """
    kind = file.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        told = "has no model_type" if kind is None else f"says model_type={str(kind)[:80]}"
        raise UserError(
            problems=[
                Problem(
                    what=f"{file.path} {told}; the kinds that are known here: {', '.join(FAMILIES)}.",
                    fix="write the numbers of the model into a part of your own recipe",
                    keys=(KEY,),
                )
            ]
        )
    text = file
    if kind == "qwen3_5_moe":
        inner = file.part("text_config")
        if inner is None and not file.problems:
            file.problem(f"{file.path} has no text_config, which describes the language model")
        text = inner or file
    found = Architecture()
    if not file.problems:
        _common(text, found)
        family(text, found)
    if file.problems:
        raise UserError(problems=file.problems)
    return found


def _whole(file: HfFile, found: Architecture, **names: str) -> None:
    for key, name in names.items():
        found.take(key.replace("moe_", "moe.", 1), file.whole(name), file.name_of(name))


def _common(file: HfFile, found: Architecture) -> None:
    _whole(
        file,
        found,
        num_layers="num_hidden_layers",
        hidden_size="hidden_size",
        num_attention_heads="num_attention_heads",
        vocab_size="vocab_size",
    )
    # What the rest is reckoned with; 1 stands for what is told as wrong, so that the rest is looked at too.
    for key, most in {
        "num_layers": MOST_LAYERS,
        "hidden_size": LARGEST,
        "num_attention_heads": LARGEST,
    }.items():
        value, name = found.fixed[key], found.names[key]
        if value is not None and not 1 <= value <= most:
            file.problem(f"{name}={value} in {file.path} is not between 1 and {most}", CORRECT)
        found.fixed[key] = value if value is not None and 1 <= value <= most else 1
    found.take("norm_epsilon", file.number("rms_norm_eps"), file.name_of("rms_norm_eps"))
    positions = file.whole("max_position_embeddings", optional=True)
    if positions is not None:
        found.released["max_position_embeddings"] = positions
    tied = file.flag("tie_word_embeddings", default=False)
    found.take("tied_embeddings", tied, file.name_of("tie_word_embeddings"))
    file.demand("hidden_act", "silu", default="silu", reason="gated layers are built with silu alone")
    found.advised["init_std"] = file.number("initializer_range", default=0.02)
    # What the classes of these models have in their code, with the exceptions that a family takes below.
    for key, value in {
        "normalization": "RMSNorm",
        "swiglu": True,
        "apply_layernorm_1p": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "rotary_percent": 1.0,
        "attention_output_gate": False,
        "multi_latent_attention": False,
        "experimental_attention_variant": None,
        "qk_layernorm": True,
        "moe.num_experts": None,
    }.items():
        found.take(key, value, "model_type")


def _softmax_attention(file: HfFile, found: Architecture, *, biased: bool = False) -> None:
    _whole(file, found, num_query_groups="num_key_value_heads")
    even = found.fixed["hidden_size"] // found.fixed["num_attention_heads"]
    found.take("kv_channels", file.whole("head_dim", default=even), file.name_of("head_dim"))
    rope = _rope(file, found)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        what = f"{file.name_of('rope_scaling')} of type {kind} in {file.path}: only latent attention has it"
        file.problem(f"{what} in Megatron's flags")
    if not biased:
        file.demand("attention_bias", False, default=False, reason="its output projection would have one too")
    file.demand("use_sliding_window", False, default=False, reason="attention windows are not built")


def _rope(file: HfFile, found: Architecture) -> dict[str, Any]:
    """Take the base of the positions and return all that is said of them.

    transformers 5 writes one mapping ``rope_parameters``, earlier releases ``rope_theta``, ``rope_scaling``.
    """
    new = file.part("rope_parameters")
    old = file.part("rope_scaling")
    place = new if new is not None and new.get("rope_theta") is not None else file
    found.take("rotary_base", place.whole("rope_theta"), place.name_of("rope_theta"))
    partial = new if new is not None and new.get("partial_rotary_factor") is not None else file
    if partial.get("partial_rotary_factor") is not None:
        value = partial.number("partial_rotary_factor")
        found.take("rotary_percent", value, partial.name_of("partial_rotary_factor"))
    names = ("type", "rope_type", *_YARN, "original_max_position_embeddings")
    return {
        name: part.get(name) for part in (old, new) if part for name in names if part.get(name) is not None
    }


_YARN = {"factor": "rotary_scaling_factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}


def _qwen3(file: HfFile, found: Architecture) -> None:
    _softmax_attention(file, found)
    _whole(file, found, ffn_hidden_size="intermediate_size")


def _qwen3_moe(file: HfFile, found: Architecture) -> None:
    _softmax_attention(file, found)
    found.advised["ffn_hidden_size"] = file.whole("intermediate_size")
    _whole(
        file,
        found,
        # transformers 5 writes the second name.
        moe_num_experts="num_experts" if file.get("num_experts") is not None else "num_local_experts",
        moe_topk="num_experts_per_tok",
        moe_ffn_hidden_size="moe_intermediate_size",
    )
    found.take("moe.shared_expert_ffn_hidden_size", None, "model_type")
    found.take("moe.router_score_function", "softmax", "model_type")
    renormed = file.flag("norm_topk_prob", default=False)
    found.take("moe.router_pre_softmax", not renormed, file.name_of("norm_topk_prob"))
    step = file.whole("decoder_sparse_step", default=1) or 1
    dense = file.get("mlp_only_layers") or []
    if not (isinstance(dense, list) and all(isinstance(layer, int) for layer in dense)):
        file.problem(f"{file.name_of('mlp_only_layers')} in {file.path} is no list of layers")
        dense = []
    layers = found.fixed["num_layers"]
    sparse = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    pattern = None if all(sparse) else str(sparse).replace(" ", "")
    found.take("moe.layer_freq", pattern, file.name_of("decoder_sparse_step"))
    _balanced(file, found)


def _balanced(file: HfFile, found: Architecture) -> None:
    found.advised |= {
        "moe.aux_loss_coeff": file.number("router_aux_loss_coef", default=0.001),
        "moe.router_dtype": "fp32",
    }


def _qwen3_5_moe(file: HfFile, found: Architecture) -> None:
    _softmax_attention(file, found)
    found.advised["ffn_hidden_size"] = file.whole("moe_intermediate_size")
    _whole(
        file,
        found,
        moe_num_experts="num_experts",
        moe_topk="num_experts_per_tok",
        moe_ffn_hidden_size="moe_intermediate_size",
        moe_shared_expert_ffn_hidden_size="shared_expert_intermediate_size",
        linear_num_key_heads="linear_num_key_heads",
        linear_num_value_heads="linear_num_value_heads",
        linear_key_head_dim="linear_key_head_dim",
        linear_value_head_dim="linear_value_head_dim",
        linear_conv_kernel_dim="linear_conv_kernel_dim",
    )
    gated = file.flag("attn_output_gate", default=True)
    found.take("attention_output_gate", gated, file.name_of("attn_output_gate"))
    for key, value in {
        "apply_layernorm_1p": True,
        "experimental_attention_variant": "gated_delta_net",
        "moe.shared_expert_gate": True,
        "moe.router_score_function": "softmax",
        # Softmax over the chosen ones: the scores of the chosen sum to one in the model's router.
        "moe.router_pre_softmax": False,
        "moe.layer_freq": None,
    }.items():
        found.take(key, value, "model_type")
    found.take("linear_attention_freq", _linear_layers(file, found), file.name_of("layer_types"))
    further = file.whole("mtp_num_hidden_layers", default=0)
    found.take("mtp_num_layers", further or None, file.name_of("mtp_num_hidden_layers"))
    _balanced(file, found)


def _linear_layers(file: HfFile, found: Architecture) -> str:
    kinds = file.get("layer_types")
    if kinds is None:
        return str(file.whole("full_attention_interval", default=4))
    known = {"linear_attention": 1, "full_attention": 0}
    layers = found.fixed["num_layers"]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(str(kind) in known for kind in kinds):
        where = f"{file.name_of('layer_types')} in {file.path}"
        file.problem(f"{where} is no list of {layers} times {' or '.join(known)}")
        return "1"
    return str([known[kind] for kind in kinds]).replace(" ", "")


def _sigmoid_experts(file: HfFile, found: Architecture) -> None:
    """Take DeepSeek-V3's experts, which GLM-4.5 has as well."""
    _whole(
        file,
        found,
        ffn_hidden_size="intermediate_size",
        moe_num_experts="n_routed_experts",
        moe_topk="num_experts_per_tok",
        moe_ffn_hidden_size="moe_intermediate_size",
    )
    width, shared = found.fixed["moe.ffn_hidden_size"], file.whole("n_shared_experts", default=0)
    whole = width * shared if width and shared else None
    found.take("moe.shared_expert_ffn_hidden_size", whole, file.name_of("n_shared_experts"))
    dense, layers = file.whole("first_k_dense_replace", default=0) or 0, found.fixed["num_layers"]
    if not 0 <= dense <= layers:
        file.problem(f"{file.name_of('first_k_dense_replace')}={dense} in {file.path}, of {layers} layers")
    pattern = f"([0]*{dense}+[1]*{layers - dense})" if dense else None
    found.take("moe.layer_freq", pattern, file.name_of("first_k_dense_replace"))
    found.take("moe.router_score_function", "sigmoid", "model_type")
    found.take("moe.router_enable_expert_bias", True, "model_type")
    groups, chosen = file.whole("n_group", default=1), file.whole("topk_group", default=1)
    found.take("moe.router_num_groups", groups, file.name_of("n_group"))
    found.take("moe.router_group_topk", chosen, file.name_of("topk_group"))
    factor = file.number("routed_scaling_factor", default=1.0)
    found.take("moe.router_topk_scaling_factor", factor, file.name_of("routed_scaling_factor"))
    file.demand("norm_topk_prob", True, default=True, reason="Megatron's sigmoid scores sum to one")
    further = file.whole("num_nextn_predict_layers", default=0)
    found.take("mtp_num_layers", further or None, file.name_of("num_nextn_predict_layers"))
    found.advised |= {
        "moe.router_pre_softmax": True,
        "moe.router_dtype": "fp32",
        "moe.load_balancing": "seq_aux_loss",
        "moe.aux_loss_coeff": file.number("aux_loss_alpha", default=0.0001),
    }


def _deepseek_v3(file: HfFile, found: Architecture) -> None:
    _sigmoid_experts(file, found)
    found.take("multi_latent_attention", True, "model_type")
    found.take("q_lora_rank", file.whole("q_lora_rank", optional=True), file.name_of("q_lora_rank"))
    _whole(
        file,
        found,
        kv_lora_rank="kv_lora_rank",
        qk_head_dim="qk_nope_head_dim",
        qk_pos_emb_head_dim="qk_rope_head_dim",
        v_head_dim="v_head_dim",
    )
    no_bias = "latent attention is built without biases"
    file.demand("attention_bias", False, default=False, reason=no_bias)
    file.demand(
        "scoring_func", "sigmoid", default="sigmoid", reason="the router of this kind scores by sigmoid"
    )
    file.demand("topk_method", "noaux_tc", default="noaux_tc", reason="experts are chosen by noaux_tc alone")
    file.demand("moe_layer_freq", 1, default=1, reason="all layers behind the dense ones have experts")
    rope = _rope(file, found)
    kind = rope.get("type") or rope.get("rope_type") or "default"
    named = file.name_of("rope_scaling")
    if kind not in ("default", "yarn"):
        file.problem(f"{named} of type {kind} in {file.path}: latent attention has none or yarn")
    found.take("rope_type", "yarn" if kind == "yarn" else "rope", named)
    if kind == "yarn":
        positions = rope.get("original_max_position_embeddings", YARN_ORIGINAL_POSITIONS)
        if positions != YARN_ORIGINAL_POSITIONS:
            what = f"{named}.original_max_position_embeddings={positions} in {file.path}"
            file.problem(f"{what}: Megatron has {YARN_ORIGINAL_POSITIONS} and no flag for it")
        for name, key in _YARN.items():
            value = rope.get(name, {"mscale": 1.0, "mscale_all_dim": 0.0}.get(name))
            if isinstance(value, bool) or not isinstance(value, int | float):
                file.problem(f"{named}.{name}={value} in {file.path} is not a number")
                continue
            found.take(key, float(value), f"{named}.{name}")


def _glm4_moe(file: HfFile, found: Architecture) -> None:
    _softmax_attention(file, found, biased=True)
    found.take("add_qkv_bias", file.flag("attention_bias", default=False), file.name_of("attention_bias"))
    found.take("qk_layernorm", file.flag("use_qk_norm", default=False), file.name_of("use_qk_norm"))
    _sigmoid_experts(file, found)


FAMILIES: dict[str, Callable[[HfFile, Architecture], None]] = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4_moe,
}
"""Readers by ``model_type``; Moonlight calls itself ``deepseek_v3``."""
