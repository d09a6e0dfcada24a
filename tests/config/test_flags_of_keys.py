"""Flags that keys give to Megatron are refused in `megatron.args`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.rules.flags import OURS
from muon_offload_cli.config.schema import MegatronConfig
from muon_offload_cli.megatron.flags import megatron_flags

# Flags that every run is given and that megatron.args may replace, since no key speaks of them.
FIXED_FLAGS = {
    "attention_dropout",
    "bf16",
    "ckpt_format",
    "distributed_backend",
    "eval_interval",
    "eval_iters",
    "hidden_dropout",
    "log_interval",
    "moe_token_dispatcher_type",
    "no_bias_dropout_fusion",
    "no_bias_gelu_fusion",
    "no_bias_swiglu_fusion",
    "no_create_attention_mask_in_dataloader",
    "no_gradient_accumulation_fusion",
    "no_masked_softmax_fusion",
    "no_persist_layer_norm",
    "no_rope_fusion",
    "num_workers",
    "position_embedding_type",
    "split",
    "tokenizer_type",
    "transformer_impl",
}


@pytest.mark.parametrize("recipe", find_recipes())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_flag_that_a_key_gives_is_refused_a_second_time(recipe: str, device: str) -> None:
    given = megatron_flags(
        replace(compose(recipe).config, megatron=MegatronConfig()),
        device=device,
        transformer_engine=False,
        data_prefix="/d",
    )
    names = {word.removeprefix("--").replace("-", "_") for word in given if word.startswith("--")}
    assert {name for name in names if name not in OURS} <= FIXED_FLAGS
