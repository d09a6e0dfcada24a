"""Names, shapes and totals of what ranks hold."""

from __future__ import annotations

import pytest

from muon_offload_cli.errors import UserError
from muon_offload_cli.planner.inventory import take_inventory
from muon_offload_cli.planner.tensors import Layers, Optimizer
from tests.planner.plans import config

EXPERT = [("linear_fc1.weight", (256, 256)), ("linear_fc2.weight", (256, 128))]


@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("moonlight_16b_a3b", 15_960_108_544),
    ],
)
@pytest.mark.parametrize("layers", list(Layers))
def test_totals_equal_the_published_ones(recipe: str, published: int, layers: Layers) -> None:
    assert take_inventory(config(recipe), layers).parameters() == published


def test_qwen35_has_what_its_config_implies() -> None:
    hidden, heads, groups, size, experts, width, vocabulary = 2048, 16, 2, 256, 256, 512, 248320
    keys, values = 16 * 128, 32 * 128
    softmax = hidden * (2 * heads + 2 * groups) * size + heads * size * hidden + 2 * size
    linear = (
        (2 * keys + 2 * values + 2 * 32) * hidden + 4 * (2 * keys + values) + 2 * 32 + 128 + values * hidden
    )
    mixture = experts * hidden + (experts + 1) * 3 * hidden * width + hidden
    layers = 10 * softmax + 30 * linear + 40 * (mixture + 2 * hidden) + hidden + 2 * vocabulary * hidden
    further = 2 * hidden * hidden + 3 * hidden + softmax + mixture + 2 * hidden
    assert take_inventory(config("qwen35_35b"), Layers.LOCAL).parameters() == layers + further


def test_totals_do_not_depend_on_how_the_model_is_cut() -> None:
    whole = take_inventory(config("tiny", "parallel=data"), Layers.LOCAL).parameters()
    for words in (
        ("parallel=tp2", "model.vocab_size=512"),
        ("parallel=tp2_ep2", "parallel.pp=2", "parallel.ep=1", "model.vocab_size=512"),
        ("parallel=data", "parallel.ep=4", "model.vocab_size=512"),
    ):
        cut = take_inventory(config("tiny", *words), Layers.LOCAL).parameters()
        # A vocabulary of 512 needs no padding; 257 bytes are padded to 384 on one tensor-parallel rank.
        assert cut - 2 * 512 * 256 == whole - 2 * 384 * 256


def test_tensors_come_in_megatrons_order_with_local_shapes() -> None:
    (stage,) = take_inventory(config("tiny", "model.num_layers=1"), Layers.LOCAL).stages
    found = [(tensor.name, tensor.shape) for tensor in stage]
    layer = "decoder.layers.0"
    assert found == [
        ("embedding.word_embeddings.weight", (256, 256)),
        (f"{layer}.input_layernorm.weight", (256,)),
        (f"{layer}.self_attention.linear_proj.weight", (256, 128)),
        (f"{layer}.self_attention.linear_qkv.weight", (256, 256)),
        (f"{layer}.pre_mlp_layernorm.weight", (256,)),
        (f"{layer}.mlp.router.weight", (8, 256)),
        *(
            (f"{layer}.mlp.experts.local_experts.{number}.{name}", shape)
            for number in range(4)
            for name, shape in EXPERT
        ),
        ("decoder.final_layernorm.weight", (256,)),
        ("output_layer.weight", (256, 256)),
    ]


def test_grouped_experts_come_matrix_by_matrix_with_transformer_engine_only() -> None:
    run = config("tiny", "model.num_layers=1", "model.moe.grouped_gemm=true")
    names = [t.name for t in take_inventory(run, Layers.TRANSFORMER_ENGINE).stages[0] if "experts" in t.name]
    fc1, fc2 = (
        [f"decoder.layers.0.mlp.experts.linear_{fc}.weight{n}" for n in range(4)] for fc in ("fc1", "fc2")
    )
    assert names == fc1 + fc2
    assert "local_experts" in take_inventory(run, Layers.LOCAL).stages[0][6].name


def test_muon_steps_matrices_but_no_embedding_and_no_filter() -> None:
    (stage,) = take_inventory(config("tiny", "model=tiny_delta", "parallel=data"), Layers.LOCAL).stages
    for tensor in stage:
        matrix = (
            len(tensor.shape) == 2 and "embedding" not in tensor.name and "output_layer" not in tensor.name
        )
        assert (tensor.optimizer is Optimizer.MUON) is matrix, tensor.name
    assert {len(tensor.shape) for tensor in stage} == {1, 2, 3}


def test_experts_have_groups_of_their_own_only_where_those_differ() -> None:
    def own(*words: str) -> bool:
        stage = take_inventory(config("tiny", *words), Layers.LOCAL).stages[0]
        return any(tensor.expert for tensor in stage)

    assert own("parallel=tp2_ep2")
    assert own("parallel=tp2_ep2", "parallel.ep=1", "parallel.etp=1")
    assert not own("parallel=tp2_ep2", "parallel.ep=1")


def test_later_stages_repeat_a_tied_embedding_and_the_further_token_layers_one() -> None:
    words = ("parallel=tp2_ep2", "parallel.pp=2", "parallel.ep=1")
    tied = take_inventory(config("tiny", *words, "model.tied_embeddings=true"), Layers.LOCAL)
    assert tied.stages[1][-1].name == "output_layer.weight"
    assert tied.stages[1][-1].shared_embedding
    further = take_inventory(config("tiny", "model=tiny_delta", *words), Layers.LOCAL)
    assert further.stages[1][0].name == "embedding.word_embeddings.weight"
    assert further.stages[1][0].shared_embedding
    assert not further.stages[1][-1].shared_embedding


def test_a_variant_that_nobody_planned_is_named() -> None:
    with pytest.raises(UserError, match=r"experimental_attention_variant=dsa"):
        take_inventory(config("tiny", "model.experimental_attention_variant=dsa"), Layers.LOCAL)
