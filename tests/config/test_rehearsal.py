"""A rehearsal keeps every kind of part and fits eight CPU ranks."""

from __future__ import annotations

import copy
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.config.changes import Change
from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.from_hf import PART
from muon_offload_cli.config.locations import find_recipes, group_options
from muon_offload_cli.config.rehearsal import MAX_RANKS, rehearse
from muon_offload_cli.config.rehearsal_model import (
    layers_with_experts,
    layers_with_linear_attention,
    pattern,
    shrink_model,
)
from muon_offload_cli.config.rules import MachineFacts, check, refuses
from muon_offload_cli.config.schema import Config, Device

RECIPES = sorted(find_recipes())
MODELS = sorted(set(group_options()["model"]) - {PART})


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_becomes_a_small_run_that_no_gate_refuses(name: str) -> None:
    small = rehearse(compose(name).config).config
    assert not refuses(check(small, frozenset(), MachineFacts()), strict=True)
    assert small.launcher.ranks_per_node <= MAX_RANKS
    assert small.device is Device.cpu
    assert small.model.hidden_size <= 512
    assert small.train.steps <= 4


@pytest.mark.parametrize("name", RECIPES)
def test_every_kind_of_layer_of_the_real_model_is_there(name: str) -> None:
    real = compose(name).config
    small = rehearse(real).config
    assert kinds(small) == kinds(real)
    assert bool(small.model.mtp_num_layers) == bool(real.model.mtp_num_layers)
    assert small.model.multi_latent_attention == real.model.multi_latent_attention
    assert bool(small.model.moe.shared_expert_ffn_hidden_size) == bool(
        real.model.moe.shared_expert_ffn_hidden_size
    )


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_run_does_not_shrink_is_untouched(name: str) -> None:
    real = compose(name).config
    before = copy.deepcopy(real)
    small = rehearse(real).config
    assert real == before
    assert small.megatron == real.megatron
    assert small.data == real.data
    assert (small.offload.engine, small.offload.fraction, small.offload.windows) == (
        real.offload.engine,
        real.offload.fraction,
        real.offload.windows,
    )


@pytest.mark.parametrize("name", ["qwen35_35b", "qwen3_4b", "tiny", "moonlight_16b_a3b", "qwen3_30b_a3b"])
def test_a_layout_that_fits_is_kept_as_it_is(name: str) -> None:
    real = compose(name).config
    small = rehearse(real).config
    assert small.parallel == real.parallel
    assert small.launcher.ranks_per_node == real.launcher.ranks_per_node


def test_pipelines_stay_uneven_and_interleaved() -> None:
    kimi = rehearse(compose("kimi_k2").config).config.parallel
    assert kimi.pp > 2
    assert kimi.decoder_first_pipeline_num_layers == kimi.decoder_last_pipeline_num_layers == 1
    deepseek = rehearse(compose("deepseek_v3").config).config.parallel
    assert deepseek.pipeline_model_parallel_layout is not None
    assert deepseek.pipeline_model_parallel_layout.count("|") + 1 == 2 * deepseek.pp
    assert deepseek.pipeline_model_parallel_layout.count("m") == 1


def test_changes_are_told_as_the_command_line_takes_them() -> None:
    told = {change.key: change for change in rehearse(compose("qwen35_35b").config).changes}
    assert str(told["device"]) == "device cuda -> cpu"
    assert str(told["model.num_layers"]) == "model.num_layers 40 -> 4"
    change = Change(key="a.b", before=None, after=True)
    assert (str(change), change.override) == ("a.b null -> true", "a.b=true")
    assert "optimizer.name" not in told


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    model=st.sampled_from(MODELS),
    uneven=st.sampled_from(["none", "first", "last", "both", "virtual"]),
)
def test_any_layout_shrinks_to_one_whose_stages_hold_whole_layers(
    tp: int, pp: int, ep: int, model: str, uneven: str
) -> None:
    config = composed(model)
    parallel = config.parallel
    parallel.tp, parallel.pp, parallel.ep = tp, pp, ep if config.model.moe.num_experts else 1
    if uneven in ("first", "both"):
        parallel.decoder_first_pipeline_num_layers = 3
    if uneven in ("last", "both"):
        parallel.decoder_last_pipeline_num_layers = 3
    if uneven == "virtual":
        parallel.num_virtual_stages_per_pipeline_rank = 4
    small, cut = shrink_model(config)
    ends = [cut.decoder_first_pipeline_num_layers, cut.decoder_last_pipeline_num_layers]
    given_ends = [end for end in ends if end is not None]
    left, stages = small.num_layers - sum(given_ends), pp - len(given_ends)
    assert left >= stages >= 0
    assert stages == 0 or left % (stages * (cut.num_virtual_stages_per_pipeline_rank or 1)) == 0
    assert stages or not left
    assert small.num_attention_heads % tp == 0
    assert (small.num_query_groups or tp) % tp == 0
    assert small.moe.num_experts is None or small.moe.num_experts % parallel.ep == 0


@pytest.mark.parametrize(
    ("text", "layers"), [("[0,1]", [0, 1]), ("([0]*1+[1]*2)", [0, 1, 1]), ("[0,1]*2", [0, 1, 0, 1])]
)
def test_patterns_are_read_as_megatron_reads_them(text: str, layers: list[int]) -> None:
    assert pattern(text) == layers


@pytest.mark.parametrize("text", ["[1]-[0]", "layers", "[1]*x"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no list"):
        pattern(text)


def kinds(config: Config) -> set[tuple[int, int]]:
    experts, linear = layers_with_experts(config.model), layers_with_linear_attention(config.model)
    return set(zip(experts, linear, strict=True))


def composed(model: str) -> Config:
    return copy.deepcopy(_composed(model))


@functools.cache
def _composed(model: str) -> Config:
    return compose("tiny", [f"model={model}", "parallel=data"]).config
