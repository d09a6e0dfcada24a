"""What `disk-plan` says before a run is what the ranks of the run report, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muon_offload_cli.cli import main
from tests.end_to_end.planned import assert_as_planned
from tests.end_to_end.runs import DP2, state, train


def test_planned_bytes_of_a_delta_net_equal_reported_bytes(tmp_path: Path, directory: Path) -> None:
    # test_bit_identity.py and test_resume.py hold their runs of other layouts against the plan.
    words = (
        *DP2,
        "model=tiny_delta",
        "parallel.ep=2",
        "megatron.param_layout=false",
        "model.linear_attention_freq=2",
        *state(directory),
        "train.steps=4",
    )
    run = train(tmp_path / "run", *words)
    assert run.exit_code == 0, run.output
    assert_as_planned(run, *words)


@pytest.mark.parametrize(
    ("recipe", "ranks", "words"),
    [
        (
            "tiny",
            "0,1,2,3",
            (
                "model=tiny_latent",
                "parallel.pp=2",
                "parallel.ep=1",
                "model.tied_embeddings=true",
                "parallel.num_virtual_stages_per_pipeline_rank=2",
            ),
        ),
        (
            "tiny",
            "0,1,2,3",
            (
                "parallel=data",
                "parallel.ep=2",
                "model=tiny_delta",
                "megatron.args.overlap_grad_reduce=true",
                "megatron.args.ddp_bucket_size=100000",
            ),
        ),
        ("qwen35_35b", "3", ()),
        ("kimi_k2", "9", ()),
    ],
    ids=["latent, virtual stages", "delta net, buckets", "qwen35_35b", "kimi_k2"],
)
def test_the_plan_agrees_with_megatrons_own_modules_tensor_by_tensor(
    recipe: str, ranks: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"recipe={recipe}", "data=mock", *words, "--ranks", ranks]
    code = main.run(["disk-plan", "--exact", "--json", *asked])
    captured = capsys.readouterr()
    assert code == 0, captured
    exact = json.loads(captured.out)["exact"]
    assert exact["found"] == []
    assert ",".join(map(str, exact["ranks"])) == ranks
    assert exact["tensors"] > 50


def test_what_megatron_cannot_build_is_told_with_its_reason(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=tiny", "device=cpu", "data=mock", *state(directory), "--ranks", "0"]
    wrong = "megatron.args.position_embedding_type=mrope"
    assert main.run(["disk-plan", "--exact", *words, wrong]) == 2
    captured = capsys.readouterr()
    assert "Megatron cannot build the model tiny_moe: --mrope-section" in captured.err
    assert "Traceback" not in captured.err
