"""What `disk-plan` says before a run is what the ranks of the run report, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muon_offload_cli.cli import main
from tests.end_to_end.runs import DP2, SMALL, TP2_EP2, state, train

COLUMNS = ("muon_parameters", "muon_state_bytes", "disk_bytes", "host_bytes", "gpu_bytes", "chunks")


@pytest.mark.parametrize(
    "words",
    [
        (*TP2_EP2, "parallel.etp=1", "offload.fraction=0.7", "offload.host_memory_gb=0.0002"),
        (
            *DP2,
            "model=tiny_delta",
            "parallel.ep=2",
            "megatron.param_layout=false",
            "model.linear_attention_freq=2",
        ),
    ],
    ids=["two tiers and device", "delta net, older layout"],
)
def test_planned_bytes_equal_reported_bytes(
    tmp_path: Path, directory: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*words, *state(directory), "train.steps=4"]
    assert main.run(["disk-plan", "--json", *SMALL, *asked]) == 0
    plan = json.loads(capsys.readouterr().out)
    planned = {rank: kind for kind in plan["kinds"] for rank in kind["ranks"]}
    run = train(tmp_path / "run", *asked)
    assert run.exit_code == 0, run.output
    assert run.reports.keys() == planned.keys()
    for rank, report in run.reports.items():
        assert {name: planned[rank][name] for name in COLUMNS} == {
            name: getattr(report, name) for name in COLUMNS
        }
        # Adam counts its steps in 4 bytes a tensor, of which there are some.
        left_over = report.adam_state_bytes - planned[rank]["adam_state_bytes"]
        assert 0 <= left_over < 400
        assert left_over % 4 == 0
        _moved_as_planned(planned[rank]["traffic"], run.records(rank)[1:])


def _moved_as_planned(traffic: dict[str, Any], records: list[Any]) -> None:
    """Compare steps after the first, which also counts what was read ahead of it."""
    assert [record.bytes_written for record in records] == [traffic["written"]] * len(records)
    # Forward and backward sweeps keep different chunks; two of them make the mean.
    assert records[0].bytes_read + records[1].bytes_read in (2 * traffic["read"], 2 * traffic["read"] + 1)


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
    wrong = "megatron.args.position_embedding_type=nope"
    assert main.run(["disk-plan", "--exact", *words, wrong]) == 2
    captured = capsys.readouterr()
    assert "Megatron cannot build the model tiny_moe: argument --position-embedding-type" in captured.err
    assert "Traceback" not in captured.err
