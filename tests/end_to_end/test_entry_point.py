"""A script that people already have, started by ``train megatron.entrypoint=...`` on CPU ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.runs import DP2, REPOSITORY, state, train
from tests.fakes.drive import directory_on_a_drive

SCRIPT = REPOSITORY / "tests" / "end_to_end" / "pretrain_mine.py"
MINE = ("data=script", f"megatron.entrypoint={SCRIPT}")
CHECKOUT = os.environ.get("MUON_OFFLOAD_MEGATRON_PATH")
ONE_RANK = ("launcher=one_rank", "parallel=data")


def test_a_script_with_model_data_and_flags_of_its_own_trains_from_disk_and_saves(tmp_path: Path) -> None:
    where = directory_on_a_drive(tmp_path) / "state"
    saved = tmp_path / "checkpoints"
    words = ('megatron.script_args=[--my_words,"a b",3]', "megatron.args.my_way=pretrain")
    run = train(
        tmp_path / "run", *MINE, *DP2, *state(where), *words, f"checkpoint.directory={saved}", "train.steps=4"
    )
    assert run.exit_code == 0, run.output
    assert "2 of 2 ranks: state on disk" in run.output
    assert "megatron.args.my_way: Megatron" in run.output
    for rank, report in run.reports.items():
        assert "mine: pretrain ['a b', '3']" in (run.folder / "logs" / f"rank_{rank}.log").read_text()
        assert (report.engine, report.steps, report.steps_from_backend, report.saves) == ("disk", 4, 4, 1)
        assert report.digests["masters"]
        losses = [record.loss for record in run.records(rank)]
        assert [record.step for record in run.records(rank)] == [1, 2, 3, 4]
        assert losses[0] is not None
        assert losses[-1] is not None
        assert losses[-1] < losses[0] - 0.5
    assert run.curve(0) == run.curve(1)
    assert (saved / "iter_0000004").is_dir()


@pytest.mark.skipif(
    CHECKOUT is None or not (Path(CHECKOUT) / "pretrain_gpt.py").is_file(),
    reason="MUON_OFFLOAD_MEGATRON_PATH names no checkout of Megatron-LM with a pretrain_gpt.py",
)
def test_a_checkouts_own_pretrain_gpt_ends_with_the_same_bits_from_disk_and_resident(tmp_path: Path) -> None:
    where = directory_on_a_drive(tmp_path) / "state"
    theirs = (f"megatron.path={CHECKOUT}", f"megatron.entrypoint={CHECKOUT}/pretrain_gpt.py", *DP2)
    disk = train(tmp_path / "disk", *theirs, *state(where), "train.steps=3")
    none = train(tmp_path / "none", *theirs, "offload=none", "train.steps=3")
    assert (disk.exit_code, none.exit_code) == (0, 0), disk.output + none.output
    for rank, report in disk.reports.items():
        assert (report.engine, report.steps_from_backend) == ("disk", 3)
        assert report.digests == none.reports[rank].digests
        assert disk.curve(rank) == none.curve(rank)


@pytest.mark.parametrize(
    ("way", "code", "told"),
    [
        ("exit", 4, "error: rank 0 failed with exit code 7 of pretrain_mine.py, before its first step."),
        ("nothing", 2, "no optimizer of Megatron's took a step in it: nothing was trained"),
        ("adam", 2, "built an optimizer without layer-wise Muon, and offload.engine=disk moves nothing else"),
    ],
)
def test_a_script_that_trains_no_muon_is_no_success(tmp_path: Path, way: str, code: int, told: str) -> None:
    where = directory_on_a_drive(tmp_path) / "state"
    run = train(tmp_path / "run", *MINE, *ONE_RANK, *state(where), f"megatron.args.my_way={way}")
    assert run.exit_code == code, run.output
    assert told in run.output
    assert "Traceback" not in run.output
    assert run.records(0) == []
    assert not json.loads((run.folder / "summary.json").read_text())["success"]
