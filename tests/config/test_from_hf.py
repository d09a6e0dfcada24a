"""Numbers from a Hugging Face config.json: filled where nobody gives them, checked where somebody does.

The files below ``hf/`` hold the keys of the published ones that are read here, with their values.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.from_hf import read_model
from muon_offload_cli.config.hf_families import FAMILIES, read_architecture
from muon_offload_cli.config.hf_file import HfFile
from muon_offload_cli.config.model_schema import ModelConfig
from muon_offload_cli.config.rehearsal import rehearse
from muon_offload_cli.config.rehearsal_model import layers_with_experts, layers_with_linear_attention
from muon_offload_cli.config.rules import check, refuses
from muon_offload_cli.config.rules.facts import MachineFacts
from muon_offload_cli.config.rules.model import context
from muon_offload_cli.errors import UserError

FOLDER = Path(__file__).parent / "hf"
RECIPES = sorted(path.name for path in FOLDER.iterdir())
# Choices of a recipe that no weights depend on.
FREE = {"name", "from_hf", "make_vocab_size_divisible_by", "ffn_hidden_size", "linear_attention_freq"}
FREE_OF_EXPERTS = {"aux_loss_coeff", "grouped_gemm"}


def published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name / "config.json").read_text())
    return found


def write(folder: Path, values: object) -> Path:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def refused(folder: Path, recipe: str = "qwen3_4b", *words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        compose(recipe, [f"model.from_hf={folder}", *words])
    return [problem.what for problem in caught.value.problems]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shipped_recipe_agrees_with_the_published_config(recipe: str) -> None:
    with_file = compose(recipe, [f"model.from_hf={FOLDER / recipe}"]).config
    alone = compose(recipe).config
    assert with_file.model.from_hf == str(FOLDER / recipe)
    assert replace(with_file.model, from_hf=None) == alone.model


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_of_a_shipped_recipe_comes_from_the_file_alone(recipe: str) -> None:
    words = ["model=from_hf", f"model.from_hf={FOLDER / recipe}"]
    filled, shipped = compose(recipe, words).config.model, compose(recipe).config.model
    assert filled.name == recipe
    assert compared(filled) == compared(shipped)


def compared(model: ModelConfig) -> dict[str, Any]:
    own = {name: getattr(model, name) for name in ModelConfig.__slots__ if name not in {*FREE, "moe"}}
    moe = {name: getattr(model.moe, name) for name in type(model.moe).__slots__}
    experts = {name: value for name, value in moe.items() if name not in FREE_OF_EXPERTS}
    experts["layer_freq"] = layers_with_experts(model)
    own["linear"] = layers_with_linear_attention(model)
    return own | experts


def test_every_number_that_differs_is_named_with_its_key_in_the_file(tmp_path: Path) -> None:
    changed = published("qwen3_30b_a3b") | {
        "num_hidden_layers": 24,
        "rope_theta": 5e6,
        "mlp_only_layers": [0],
    }
    told = refused(write(tmp_path, changed), "qwen3_30b_a3b")
    assert told[0].startswith("model.num_layers=48, and num_hidden_layers in ")
    assert told[0].endswith(f"{tmp_path}/config.json makes it 24.")
    assert [what.partition("=")[0] for what in told] == ["model.num_layers", "model.rotary_base"]
    words = ["model.num_layers=24", "model.rotary_base=5000000"]
    filled = compose("qwen3_30b_a3b", [f"model.from_hf={tmp_path}", *words]).config
    assert layers_with_experts(filled.model) == [0] + [1] * 23


@pytest.mark.parametrize(
    ("recipe", "word", "key"),
    [
        ("qwen3_4b", "model.moe.num_experts=8", "model.moe.num_experts"),
        ("qwen35_35b", 'model.linear_attention_freq="[1]*40"', "model.linear_attention_freq"),
        ("qwen35_35b", "model.experimental_attention_variant=null", "model.experimental_attention_variant"),
        ("moonlight_16b_a3b", "model.q_lora_rank=512", "model.q_lora_rank"),
        ("glm45_air", "model.add_qkv_bias=false", "model.add_qkv_bias"),
    ],
)
def test_what_the_command_line_says_is_checked_as_well(recipe: str, word: str, key: str) -> None:
    told = refused(FOLDER / recipe, recipe, word)
    assert told[0].startswith(f"{key}=")


def test_patterns_and_numbers_spelled_otherwise_are_the_same() -> None:
    words = [f"model.from_hf={FOLDER / 'qwen35_35b'}", 'model.linear_attention_freq="[1,1,1,0]*10"']
    assert compose("qwen35_35b", words).config.model.num_layers == 40


def test_a_layer_of_a_further_token_may_be_left_out_and_training_may_differ() -> None:
    words = ["model.mtp_num_layers=null", "model.moe.aux_loss_coeff=0.01", "model.init_std=0.01"]
    config = compose("glm45_air", [f"model.from_hf={FOLDER / 'glm45_air'}", *words]).config
    assert config.model.mtp_num_layers is None


def test_positions_of_the_file_go_before_those_of_a_part_and_longer_sequences_are_warned_of(
    tmp_path: Path,
) -> None:
    base = f"model.from_hf={write(tmp_path, published('qwen3_4b') | {'max_position_embeddings': 1000})}"
    for words in ([base], [base, "model=from_hf"]):
        composed = compose("qwen3_4b", words)
        (told,) = context(composed.config, composed.written, MachineFacts())
        assert told.what.startswith(
            "train.sequence_length=4096 is longer than model.max_position_embeddings=1000, "
        )
        assert told.fix == "train.sequence_length=1000"
    own = compose("qwen3_4b", [base, "model.max_position_embeddings=8192"])
    assert context(own.config, own.written, MachineFacts()) == []


def test_a_wrong_number_of_the_file_is_to_be_corrected_there_and_not_in_a_circle(tmp_path: Path) -> None:
    wrong = published("qwen3_4b") | {"num_key_value_heads": 3, "rms_norm_eps": float("nan")}
    layout = ["parallel.ep=1", "parallel.tp=1", "parallel.sequence_parallel=false"]
    composed = compose("tiny", [f"model.from_hf={write(tmp_path, wrong)}", "model=from_hf", *layout])
    found = check(
        composed.config, composed.written, MachineFacts(), own=composed.own, from_file=composed.from_file
    )
    assert [problem.fix for problem in refuses(found) if problem.keys[0].startswith("model.n")] == [
        f"correct rms_norm_eps in {tmp_path}/config.json: 1e-06 would do",
        f"correct num_key_value_heads in {tmp_path}/config.json: 2 would do",
    ]
    words = [f"model.from_hf={tmp_path}", "model=from_hf", "model.num_query_groups=2", *layout]
    with pytest.raises(UserError) as caught:
        compose("tiny", words)
    assert caught.value.problems[0].fix == "model.num_query_groups=3"
    write(tmp_path, published("qwen3_4b") | {"num_attention_heads": 0})
    with pytest.raises(UserError) as caught:
        compose("tiny", words[:2])
    assert caught.value.problems[0].fix == "download the file again, or correct the key"


def test_a_right_file_is_not_to_be_changed_for_a_layout_that_does_not_suit_it(tmp_path: Path) -> None:
    odd = write(tmp_path, published("qwen3_4b") | {"intermediate_size": 9731})
    composed = compose("qwen3_4b", [f"model.from_hf={odd}", "model=from_hf"])
    found = check(composed.config, composed.written, MachineFacts(), from_file=composed.from_file)
    (problem,) = [each for each in refuses(found) if "model.ffn_hidden_size" in each.keys]
    assert (problem.keys, problem.fix) == (("model.ffn_hidden_size", "parallel.tp"), "another parallel.tp")


def test_transformers_5_spells_positions_and_experts_otherwise(tmp_path: Path) -> None:
    values = published("qwen3_30b_a3b")
    values["rope_parameters"] = {"rope_theta": values.pop("rope_theta"), "rope_type": "default"}
    values["num_local_experts"] = values.pop("num_experts")
    assert compose("qwen3_30b_a3b", [f"model.from_hf={write(tmp_path, values)}"])


def test_a_recipe_of_ones_own_needs_no_part_for_the_model(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    folder = FOLDER / "qwen3_4b"
    mine.write_text(
        "defaults: [data: mock]\n"
        f"model: {{from_hf: {folder}}}\n"
        "optimizer: {lr: 1.0e-5}\n"
        "train: {steps: 1, sequence_length: 8, global_batch: 1}\n"
    )
    for words in ([], ["model=from_hf"]):
        model = compose(str(mine), words).config.model
        assert (model.name, model.num_layers, model.from_hf) == ("qwen3_4b", 36, str(folder))


def test_a_folder_below_home_and_a_relative_one_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, published("qwen3_4b"))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    for given_as in (f"'~/{tmp_path.name}'", "."):
        config = compose("qwen3_4b", [f"model.from_hf={given_as}"]).config
        assert config.model.from_hf == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "config.json:1:2: malformed JSON"),
        ("[1]", "is list where a mapping is due"),
        ("{}", "has no model_type; the kinds that are known here: qwen3, qwen3_moe"),
        ('\ufeff{"model_type": "llama"}', "says model_type=llama"),
        ('{"model_type": "llama"}', "says model_type=llama; the kinds that are known here: qwen3"),
        ('{"model_type": ["qwen3"]}', "the kinds that are known here"),
        ('{"model_type": "qwen3_5_moe"}', "has no text_config"),
        ('{"model_type": "qwen3_5_moe", "text_config": 3}', "text_config=3 in"),
    ],
)
def test_a_file_that_is_none_is_refused_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    (what,) = refused(write(tmp_path, text))
    assert told in what
    assert str(tmp_path) in what


def test_every_key_that_is_missing_or_of_another_type_is_told_at_once(tmp_path: Path) -> None:
    values = published("deepseek_v3") | {"hidden_size": "7168", "rms_norm_eps": True, "n_group": 1.5}
    del values["num_hidden_layers"], values["kv_lora_rank"]
    told = "\n".join(refused(write(tmp_path, values), "deepseek_v3"))
    for words in (
        "has no num_hidden_layers, which must be a number without a fraction",
        "has no kv_lora_rank",
        'hidden_size="7168" in',
        "rms_norm_eps=true in",
        "n_group=1.5 in",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("recipe", "changes", "told"),
    [
        ("qwen3_4b", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("qwen3_4b", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_4b", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3_4b", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling of type yarn"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method=greedy"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear"}}, "rope_scaling of type linear"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": "a"}}, "rope_scaling.factor=a"),
        ("glm45_air", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("glm45_air", {"hidden_size": -1}, "hidden_size=-1 in"),
        ("glm45_air", {"first_k_dense_replace": 10**30}, "of 46 layers"),
        ("glm45_air", {"num_hidden_layers": 10**30}, "is not between 1 and 4000."),
        ("glm45_air", {"num_attention_heads": 0}, "num_attention_heads=0 in"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    tmp_path: Path, recipe: str, changes: dict[str, Any], told: str
) -> None:
    assert told in refused(write(tmp_path, published(recipe) | changes), recipe)[0]


@pytest.mark.parametrize("given_as", ["/nonexistent/x", "'~nobody_here/x'", "Qwen/Qwen3-4B"])
def test_no_folder_is_one_problem(given_as: str) -> None:
    (what,) = refused(Path("x"), "qwen3_4b", "model=from_hf", f"model.from_hf={given_as}")
    assert "there is no folder" in what


def test_the_part_without_a_folder_asks_for_one_and_nothing_else() -> None:
    with pytest.raises(UserError) as caught:
        compose("qwen3_4b", ["model=from_hf"])
    assert [problem.keys for problem in caught.value.problems] == [("model.from_hf",)]


def test_a_rehearsal_takes_no_weights() -> None:
    real = compose("qwen35_35b", [f"model.from_hf={FOLDER / 'qwen35_35b'}"]).config
    assert rehearse(real).config.model.from_hf is None


@settings(deadline=None)
@given(
    name=st.sampled_from(RECIPES),
    values=st.dictionaries(
        st.integers(0, 60),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=5),
            st.just([]),
            st.just({}),
        ),
        max_size=4,
    ),
)
def test_any_value_at_any_key_is_read_or_refused(name: str, values: dict[int, Any]) -> None:
    changed = copy.deepcopy(published(name))
    section = changed.get("text_config", changed)
    keys = sorted(section)
    for place, value in values.items():
        section[keys[place % len(keys)]] = value
    file = HfFile(Path("config.json"), section)
    kind = published(name)["model_type"]
    section["model_type"] = "qwen3_5_moe_text" if kind == "qwen3_5_moe" else kind
    try:
        found = read_architecture(file)
    except UserError as error:
        assert error.problems
    else:
        assert found.fixed["num_layers"] is not None


def test_every_kind_of_model_is_read_from_a_published_file() -> None:
    kinds = {published(name).get("text_config", published(name))["model_type"] for name in RECIPES}
    kinds |= {published(name)["model_type"] for name in RECIPES}
    assert kinds == set(FAMILIES)
    assert read_model(str(FOLDER / "kimi_k2")).architecture.fixed["moe.num_experts"] == 384


@pytest.mark.parametrize("name", ["5", "1_0", "2.50", "true"])
def test_a_folder_whose_name_could_be_a_number_is_read_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"model.from_hf={name}"]
    with pytest.raises(UserError, match=f"model.from_hf={name}: there is no folder {tmp_path}/{name}"):
        compose("qwen3_4b", words)
    (tmp_path / name).mkdir()
    write(tmp_path / name, published("qwen3_4b"))
    assert compose("qwen3_4b", words).config.model.from_hf == str(tmp_path / name)


def test_an_empty_word_and_a_file_are_told_as_what_they_are(tmp_path: Path) -> None:
    assert refused(Path("x"), "qwen3_4b", "model.from_hf=") == ["model.from_hf= is empty."]
    path = write(tmp_path, published("qwen3_4b")) / "config.json"
    with pytest.raises(UserError) as caught:
        read_model(str(path))
    (problem,) = caught.value.problems
    assert f"{path} is a file" in problem.what
    assert problem.fix == f"model.from_hf={tmp_path}"
