"""Flags of real models: pure, from the config alone."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.locations import find_recipes
from muon_offload_cli.config.rules.flags import LAYOUT_OPT_IN
from muon_offload_cli.megatron.flags import CHUNKED_OFFLOAD, megatron_flags


def flags(
    *words: str, device: str = "cpu", transformer_engine: bool = False, known: Set[str] = frozenset()
) -> dict[str, Any]:
    config = compose(words[0], words[1:]).config
    listed = megatron_flags(
        config, device=device, transformer_engine=transformer_engine, data_prefix=None, known=known
    )
    given: dict[str, list[str]] = {}
    for word in listed:
        if word.startswith("--"):
            assert word not in given, f"{word} twice"
            current = given.setdefault(word.removeprefix("--"), [])
        else:
            current.append(word)
    return {name: " ".join(values) for name, values in given.items()}


@pytest.mark.parametrize("name", sorted(find_recipes()))
def test_no_flag_is_given_twice(name: str) -> None:
    assert flags(name)["num-layers"]


def test_the_loss_of_examples_is_a_mean_over_all_their_tokens_and_not_over_micro_batches() -> None:
    assert "calculate-per-token-loss" in flags("tiny", "data=chat", "data.paths=[/a.jsonl]")
    assert "calculate-per-token-loss" not in flags("tiny")


def test_a_hugging_face_tokenizer_leaves_the_models_rows_as_they_are() -> None:
    folder = Path(__file__).parents[1] / "config" / "hf" / "qwen3_4b"
    given = flags("qwen3_4b", f"model.from_hf={folder}", "model.make_vocab_size_divisible_by=128")
    assert (given["tokenizer-type"], given["tokenizer-model"]) == ("HuggingFaceTokenizer", str(folder))
    # 151936 is no multiple of 128 x TP2.
    assert (given["vocab-size"], given["padded-vocab-size"]) == ("151936", "152064")
    for words in (["model.hf_tokenizer=false"], ["data=stdlib"]):
        assert flags("qwen3_4b", f"model.from_hf={folder}", *words)["tokenizer-type"] == "NullTokenizer"


def test_latent_attention_replaces_query_groups() -> None:
    given = flags("moonlight_16b_a3b")
    assert "group-query-attention" not in given
    assert "q-lora-rank" not in given
    assert (given["kv-lora-rank"], given["qk-head-dim"], given["v-head-dim"]) == ("512", "128", "128")
    assert given["moe-layer-freq"] == "([0]*1+[1]*26)"
    assert given["moe-router-topk-scaling-factor"] == "2.446"


def test_a_dense_model_gets_no_flag_of_experts_or_of_other_attention() -> None:
    given = flags("qwen3_4b")
    assert not [name for name in given if name.startswith(("moe-", "linear-", "mtp-", "experimental"))]
    assert "multi-latent-attention" not in given
    assert "untie-embeddings-and-output-weights" not in given


def test_qwen35_gets_every_kind_of_layer() -> None:
    given = flags("qwen35_35b")
    assert given["experimental-attention-variant"] == "gated_delta_net"
    assert (given["linear-attention-freq"], given["mtp-num-layers"]) == ("4", "1")
    assert {"attention-output-gate", "apply-layernorm-1p", "moe-shared-expert-gate"} <= set(given)
    assert (given["expert-tensor-parallel-size"], given["rotary-percent"]) == ("1", "0.25")


def test_uneven_and_virtual_stages_are_passed_on() -> None:
    assert flags("kimi_k2")["decoder-last-pipeline-num-layers"] == "2"
    assert flags("deepseek_v3")["pipeline-model-parallel-layout"] == "Et*3|(tt|)*29m|L"


def test_the_fused_rotation_is_left_out_where_transformer_engine_refuses_it() -> None:
    assert "no-rope-fusion" in flags("moonlight_16b_a3b", device="cuda", transformer_engine=True)
    assert "no-rope-fusion" not in flags("kimi_k2", device="cuda", transformer_engine=True)
    assert "no-rope-fusion" in flags("kimi_k2")


def test_a_scripts_own_data_gets_the_vocabulary_and_no_other_flag_of_data() -> None:
    words = ("tiny", "data=script", "megatron.entrypoint=/a.py", "model.vocab_size=300")
    own = flags(*words, device="cuda")
    assert own["vocab-size"] == "300"
    left = {"tokenizer-type", "mock-data", "data-path", "split", "num-workers"}
    assert not left & set(own)
    assert flags(*words)["num-workers"] == "0"
    assert left - {"data-path"} <= set(flags("tiny", "data=mock", device="cuda"))


def test_the_layout_is_asked_for_in_the_parsers_own_words() -> None:
    compact = ("tiny", "megatron.param_layout=false")
    assert "no-use-layer-wise-param-layout" in flags(*compact)
    assert not {name for name in flags("tiny") if "param-layout" in name}
    assert not {name for name in flags(*compact, known={LAYOUT_OPT_IN}) if "param-layout" in name}
    assert "use-layer-wise-param-layout" in flags("tiny", known={LAYOUT_OPT_IN})


def test_a_native_offloader_gets_our_keys_for_mapped_alone() -> None:
    known = {CHUNKED_OFFLOAD}
    given = flags("tiny", "offload=mapped", "offload.fraction=0.5", known=known)
    assert "chunked-optimizer-state-offload" in given
    # tiny's 0.5 MiB: whole MiB alone, and 0 would mean everything at once.
    assert given["optimizer-state-offload-chunk-size-mb"] == "1"
    assert given["optimizer-state-offload-fraction"] == "0.5"
    assert not {name for name in flags("tiny", known=known) if "state-offload" in name}
    assert not {name for name in flags("tiny", "offload=mapped") if "state-offload" in name}
