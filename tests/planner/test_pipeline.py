"""What pipeline stages hold."""

from __future__ import annotations

import pytest

from muon_offload_cli.errors import UserError
from muon_offload_cli.planner.pattern import linear_layers, moe_layers
from muon_offload_cli.planner.pipeline import model_chunks
from tests.planner.plans import config

PP2 = ("parallel.pp=2", "parallel.ep=1")


def layers(*words: str) -> list[list[list[int]]]:
    return [[list(chunk.layers) for chunk in stage] for stage in model_chunks(config("tiny", *words))]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("parallel.pp=1",), [[[0, 1, 2, 3]]]),
        (PP2, [[[0, 1]], [[2, 3]]]),
        ((*PP2, "parallel.decoder_first_pipeline_num_layers=1"), [[[0]], [[1, 2, 3]]]),
        ((*PP2, "parallel.decoder_last_pipeline_num_layers=1"), [[[0, 1, 2]], [[3]]]),
        ((*PP2, "parallel.num_virtual_stages_per_pipeline_rank=2"), [[[0], [2]], [[1], [3]]]),
        ((*PP2, "megatron.args.num_layers_per_virtual_pipeline_stage=1"), [[[0], [2]], [[1], [3]]]),
        ((*PP2, "parallel.pipeline_model_parallel_layout='Ettt,|tL'"), [[[0, 1, 2]], [[3]]]),
        ((*PP2, "parallel.pipeline_model_parallel_layout='Et|(t|)*2tL'"), [[[0], [2]], [[1], [3]]]),
        (
            (
                *PP2,
                "model.num_layers=3",
                "megatron.args.account_for_embedding_in_pipeline_split=true",
            ),
            [[[0]], [[1, 2]]],
        ),
        (
            (
                *PP2,
                "model.num_layers=7",
                "megatron.args.account_for_loss_in_pipeline_split=true",
                "megatron.args.num_layers_per_virtual_pipeline_stage=2",
            ),
            [[[0, 1], [4, 5]], [[2, 3], [6]]],
        ),
    ],
)
def test_layers_are_shared_out_over_stages(words: tuple[str, ...], expected: list[list[list[int]]]) -> None:
    assert layers(*words) == expected


def test_the_final_norm_follows_the_last_decoder_layer_if_further_tokens_are_predicted() -> None:
    words = (*PP2, "model=tiny_delta", "parallel.pipeline_model_parallel_layout='Ett|tt|m|L'")
    first, second = model_chunks(config("tiny", *words))
    assert [chunk.norm for chunk in (*first, *second)] == [False, False, True, False]
    assert [chunk.further for chunk in (*first, *second)] == [0, 1, 0, 0]
    assert second[1].last


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, [True] * 4),
        ("2", [True, False, True, False]),
        ("([0]*1+[1]*3)", [False, True, True, True]),
        ("[0,1]*2", [False, True, False, True]),
        ("2*[0,1]", [False, True, False, True]),
    ],
)
def test_patterns_name_layers_with_experts(pattern: str | None, expected: list[bool]) -> None:
    assert moe_layers(pattern, 4) == expected


@pytest.mark.parametrize(
    "pattern", ["[1]*3", "[2]*4", "[1]*10**9", "[1]*1000000", "print(1)", "(", "0", "x" * 9]
)
def test_patterns_that_say_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="layer_freq"):
        moe_layers(pattern, 4)


def test_every_nth_layer_keeps_softmax_attention() -> None:
    assert linear_layers("4", 8) == [True, True, True, False] * 2
    assert linear_layers("[1,0]", 2) == [True, False]
    with pytest.raises(UserError, match="linear_attention_freq"):
        linear_layers(None, 4)
