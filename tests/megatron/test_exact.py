"""Megatron's own parser, modules and layer-wise code on every recipe, without devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.yaml_files import save_config
from tests.fakes.fake_torchrun import HANG_S

HERE = Path(__file__).parent
RECIPES = sorted(find_recipes())
LATENT = ["tiny", "model=tiny_latent", "parallel=data", "parallel.pp=2"]
UNEVEN = [*LATENT, "parallel.decoder_first_pipeline_num_layers=1"]
DELTA = ["tiny", "model=tiny_delta"]
IMPOSSIBLE = [*LATENT, "model.attention_output_gate=true"]
NO_FLAG = ["tiny", "megatron.args.moe_router_score_function=best"]

# Of the model's publisher, to the last parameter where one is given.
PUBLISHED = {
    "gpt_2b9": 2_879_492_096,
    "qwen3_4b": 4_022_468_096,
    "qwen3_30b_a3b": 30_532_122_624,
}
# In billions, as their publishers round them; layers that predict further tokens are not in there.
BILLIONS = {"moonlight_16b_a3b": 15.96, "deepseek_v3": 671}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Any]:
    asked = [[name] for name in RECIPES] + [UNEVEN, DELTA, IMPOSSIBLE, NO_FLAG]
    words = [sys.executable, str(HERE / "recipes_on_meta.py"), json.dumps(asked)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    answers: dict[str, Any] = json.loads(run.stdout)
    return answers


@pytest.mark.parametrize("name", RECIPES)
def test_megatron_accepts_and_builds_every_recipe_at_its_real_layout(
    name: str, verdicts: dict[str, Any]
) -> None:
    assert "problem" not in verdicts[name], verdicts[name]
    assert 0 < verdicts[name]["muon"] < verdicts[name]["all"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_number(name: str, verdicts: dict[str, Any]) -> None:
    assert verdicts[name]["all"] == PUBLISHED[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_round_to_the_published_billions(name: str, verdicts: dict[str, Any]) -> None:
    billions = (verdicts[name]["all"] - verdicts[name]["mtp"]) / 1e9
    assert round(billions, 2 if BILLIONS[name] < 100 else 0) == BILLIONS[name]


def test_qwen35_has_what_its_config_implies(verdicts: dict[str, Any]) -> None:
    # Term by term from text_config of Qwen/Qwen3.5-35B-A3B, as transformers lays out its modules.
    hidden, experts, width, head = 2048, 256, 512, 256
    keys, values = 16 * 128, 32 * 128
    delta_net = (
        hidden * (2 * keys + 2 * values)  # in_proj_qkv, in_proj_z
        + hidden * 2 * 32  # in_proj_b, in_proj_a
        + (2 * keys + values) * 4  # conv1d
        + 2 * 32  # dt_bias, A_log
        + 128  # norm
        + values * hidden  # out_proj
    )
    attention = (
        hidden * 2 * 16 * head  # q_proj with its gate
        + 2 * hidden * 2 * head  # k_proj, v_proj
        + 16 * head * hidden  # o_proj
        + 2 * head  # q_norm, k_norm
    )
    expert_layer = experts * hidden + (experts + 1) * 3 * hidden * width + hidden  # router, experts, gate
    norms = 2 * hidden
    layers = 30 * delta_net + 10 * attention + 40 * (expert_layer + norms)
    further_token = attention + expert_layer + norms + 2 * hidden * hidden + 3 * hidden
    ends = 2 * 248_320 * hidden + hidden
    assert layers + ends == 34_660_610_688
    assert verdicts["qwen35_35b"] == {
        "all": layers + ends + further_token,
        "mtp": further_token,
        "muon": verdicts["qwen35_35b"]["muon"],
    }


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "query_rank", "vocabulary", "dense", "moe", "experts", "shared", "width"),
    [
        ("moonlight_16b_a3b", 2048, 16, None, 163_840, (1, 11_264), 26, 64, 2, 1408),
        ("deepseek_v3", 7168, 128, 1536, 129_280, (3, 18_432), 58, 256, 1, 2048),
        ("kimi_k2", 7168, 64, 1536, 163_840, (1, 18_432), 60, 384, 1, 2048),
    ],
)
def test_latent_attention_models_have_what_their_configs_imply(
    name: str,
    hidden: int,
    heads: int,
    query_rank: int | None,
    vocabulary: int,
    dense: tuple[int, int],
    moe: int,
    experts: int,
    shared: int,
    width: int,
    verdicts: dict[str, Any],
) -> None:
    # Term by term from the Hugging Face config, as DeepseekV3ForCausalLM lays out its modules; nope 128,
    # rope 64, value 128, kv rank 512 in all three. The router's bias is no parameter.
    queries = hidden * heads * 192 if query_rank is None else query_rank * (hidden + 1 + heads * 192)
    keys_values = hidden * (512 + 64) + 512 + 512 * heads * 256
    layer = queries + keys_values + heads * 128 * hidden + 2 * hidden
    dense_layers = dense[0] * (layer + 3 * hidden * dense[1])
    moe_layers = moe * (layer + experts * hidden + (experts + shared) * 3 * hidden * width)
    ends = 2 * vocabulary * hidden + hidden
    assert verdicts[name]["all"] - verdicts[name]["mtp"] == dense_layers + moe_layers + ends


def test_glm45_air_has_what_its_config_implies(verdicts: dict[str, Any]) -> None:
    # config.json of zai-org/GLM-4.5-Air, published as 106 billion.
    hidden, heads, groups, head = 4096, 96, 8, 128
    qkv = (heads + 2 * groups) * head
    layer = hidden * qkv + qkv + heads * head * hidden + 2 * hidden
    dense_layer = layer + 3 * hidden * 10_944
    moe_layer = layer + 128 * hidden + 129 * 3 * hidden * 1408
    ends = 2 * 151_552 * hidden + hidden
    total = verdicts["glm45_air"]["all"] - verdicts["glm45_air"]["mtp"]
    assert total == dense_layer + 45 * moe_layer + ends
    assert total // 10**9 == 106


def test_small_layouts_with_every_kind_of_layer_build(verdicts: dict[str, Any]) -> None:
    assert verdicts[" ".join(DELTA)]["mtp"] > 0
    assert verdicts[" ".join(UNEVEN)]["all"] > 0


def test_a_model_that_megatron_refuses_comes_with_its_reason(verdicts: dict[str, Any]) -> None:
    assert "Output gate is not supported for MLA" in verdicts[" ".join(IMPOSSIBLE)]["problem"]
    assert "invalid choice: 'best'" in verdicts[" ".join(NO_FLAG)]["problem"]


@pytest.mark.parametrize("layout", ["true", "false"])
def test_every_matrix_has_one_owner_among_its_data_parallel_ranks(layout: str, tmp_path: Path) -> None:
    config = compose("tiny", ["parallel=tp2_ep2", f"megatron.param_layout={layout}"]).config
    path = tmp_path / "resolved.yaml"
    save_config(config, path)
    answer = _exact(path)
    ranks = {int(rank): entries for rank, entries in answer["ranks"].items()}
    assert sorted(ranks) == [0, 1, 2, 3]
    # tp-cp-ep-dp-pp: with TP2 ranks 0 and 2 hold the same dense parts; EP2 x ETP2 leaves no expert copies.
    for left, right in zip(ranks[0], ranks[2], strict=True):
        assert left["name"] == right["name"]
        assert left["shape"] == right["shape"]
        if left["expert"]:
            assert left["owner"]
            assert right["owner"]
        elif left["optimizer"] == "muon":
            assert left["owner"] != right["owner"]
        else:
            size = left["owned_numel"] + right["owned_numel"]
            assert size == _numel(left)
    # Tensor-parallel peers own the same list, or Newton-Schulz would wait for ever.
    assert [entry["owner"] for entry in ranks[0]] == [entry["owner"] for entry in ranks[1]]


def test_chosen_ranks_alone_are_built_and_a_rank_beyond_the_world_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    save_config(compose("tiny").config, path)
    assert list(_exact(path, "--ranks", "3")["ranks"]) == ["3"]
    answer = _exact(path, "--ranks", "4", code=2)
    assert answer["problems"][0]["what"] == "--ranks 4: the world has ranks 0 to 3."


def _exact(path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "muon_offload_cli.megatron.exact", str(path), *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert run.returncode == code, run.stderr[-3000:]
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


def _numel(entry: dict[str, Any]) -> int:
    size = 1
    for length in entry["shape"]:
        size *= length
    return size
