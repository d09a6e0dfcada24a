"""Runs that go on from a checkpoint: the same bits, other engines, other layouts, new schedules, new runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from muon_offload_cli.checkpoints.listing import content_fault, has_optimizer, list_checkpoints
from muon_offload_cli.checkpoints.names import step_folder
from tests.end_to_end import runs
from tests.end_to_end.planned import assert_as_planned
from tests.end_to_end.runs import DP2, TP2_EP2, Run
from tests.end_to_end.saving import ONE, Saved, complete, engine_words, losses, saving, seal_bytes
from tests.fakes.drive import directory_on_a_drive

ROUNDING = 2e-3
"""Relative difference of losses between layouts: sums in bf16 have another order."""
SOME_IN_HOST_MEMORY = "offload.host_memory_gb=0.0002"


@pytest.fixture(scope="module")
def streamed(straight: Saved, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The same from step 2 on, with its state on disk, saving after every step."""
    root = tmp_path_factory.mktemp("streamed")
    state = directory_on_a_drive(root) / "state"
    run = runs.train(
        root / "run",
        *TP2_EP2,
        *engine_words("disk", state),
        f"resume={straight.checkpoints}/iter_0000002",
        *saving(root / "saved", interval=1),
    )
    assert run.exit_code == 0, run.output
    return Saved(run=run, checkpoints=root / "saved")


def same_end(straight: Run, resumed: Run) -> None:
    ends = {rank: report.digests for rank, report in straight.reports.items()}
    assert {rank: report.digests for rank, report in resumed.reports.items()} == ends
    later = resumed.curve(0)
    assert later == [entry for entry in straight.curve(0) if entry[0] >= later[0][0]]


def test_a_streamed_run_goes_on_from_a_resident_one_bit_for_bit(straight: Saved, streamed: Saved) -> None:
    same_end(straight.run, streamed.run)
    assert streamed.run.reports[0].loaded_step == 2
    assert complete(streamed.checkpoints) == [3, 4, 5, 6]
    sealed = list_checkpoints(streamed.checkpoints)[0].seal
    assert sealed is not None
    assert (sealed.engine, sealed.layout["tp"], sealed.layout["ep"], sealed.world_size) == ("disk", 2, 2, 4)
    assert content_fault(step_folder(streamed.checkpoints, 3), sealed) == ""


def test_adaptive_muon_goes_on_streamed_from_a_resident_run_bit_for_bit(
    tmp_path: Path, directory: Path
) -> None:
    # Stepped in a form that the installed packages lack; see tests/fakes/adaptive_muon.py.
    words, adaptive = (*DP2, "train.steps=4"), {"kind": "adaptive"}
    saved = saving(tmp_path / "saved", interval=2)
    straight = runs.train(tmp_path / "straight", *words, "offload=none", *saved, fault=adaptive)
    assert straight.exit_code == 0, straight.output
    resumed = runs.train(
        tmp_path / "resumed",
        *words,
        *engine_words("disk", directory),
        f"resume={tmp_path / 'saved' / 'iter_0000002'}",
        fault=adaptive,
    )
    assert resumed.exit_code == 0, resumed.output
    same_end(straight, resumed)
    report = resumed.reports[0]
    assert set(report.digests) == {"weights", "masters", "momenta", "second_moments"}
    assert report.disk_bytes >= report.muon_state_bytes == 12 * report.muon_parameters > 0


@pytest.mark.parametrize(
    ("engine", "more"),
    [("none", ()), ("host", ("offload.chunk_mb=0",)), ("mapped", ("offload.chunk_mb=0.2",))],
)
def test_every_engine_goes_on_from_streamed_state_bit_for_bit(
    straight: Saved, streamed: Saved, tmp_path: Path, directory: Path, engine: str, more: tuple[str, ...]
) -> None:
    resumed = runs.train(
        tmp_path / "run",
        *TP2_EP2,
        *engine_words(engine, directory),
        *more,
        f"resume={streamed.checkpoints}/iter_0000004",
    )
    assert resumed.exit_code == 0, resumed.output
    same_end(straight.run, resumed)


def test_other_layouts_go_on_and_back_within_rounding(
    straight: Saved, streamed: Saved, tmp_path: Path, directory: Path
) -> None:
    def go_on(name: str, source: Path, steps: int, *words: str) -> Run:
        run = runs.train(
            tmp_path / name,
            *words,
            f"train.steps={steps}",
            f"resume={source}",
            *saving(tmp_path / f"saved_{name}"),
        )
        assert run.exit_code == 0, run.output
        return run

    on_disk = engine_words("disk", directory)
    source = streamed.checkpoints / "iter_0000003"
    two = go_on("two", source, 4, *DP2, *on_disk, "offload.chunk_mb=0.1")
    resident = go_on("resident", source, 4, *DP2, "offload=none")
    staged = go_on("staged", source, 4, *DP2, "parallel.pp=2", *on_disk, SOME_IN_HOST_MEMORY)
    ep4 = ("launcher=four_ranks", "parallel=data", "parallel.ep=4", "offload=host")
    four = go_on("four", tmp_path / "saved_two", 5, *ep4)
    assert_as_planned(four, *ep4)
    back = go_on("back", tmp_path / "saved_four", 6, *TP2_EP2, *on_disk, SOME_IN_HOST_MEMORY)
    for run in (staged, back):
        assert all(report.disk_bytes and report.host_bytes for report in run.reports.values())
    # What resharding rounds is the same without offload, to the last bit.
    same_end(resident, two)
    expected = losses(straight.run)
    seen = losses(two) | losses(four) | losses(back)
    assert sorted(seen) == [4, 5, 6]
    # The last stage is the one that computes losses.
    for step, loss in [*seen.items(), (4, staged.records(1)[0].loss)]:
        assert loss == pytest.approx(expected[step], rel=ROUNDING)


def test_another_learning_rate_and_schedule_load(single: Saved, tmp_path: Path, directory: Path) -> None:
    run = runs.train(
        tmp_path / "run",
        *ONE,
        *engine_words("disk", directory),
        f"resume={single.checkpoints}",
        "optimizer.lr=1e-4",
        "optimizer.weight_decay=0.2",
        "optimizer.lr_decay_style=linear",
        "train.steps=10",
    )
    assert run.exit_code == 0, run.output
    rates = [record.learning_rate for record in run.records(0)]
    assert rates == pytest.approx([3e-5, 2e-5, 1e-5, 0.0], abs=1e-6)


@pytest.mark.parametrize("engine", ["disk", pytest.param("none", marks=pytest.mark.nightly)])
def test_weights_alone_begin_a_new_run_and_masters_follow_them(
    single: Saved, tmp_path: Path, directory: Path, engine: str
) -> None:
    run = runs.train(
        tmp_path / "run",
        *ONE,
        *engine_words(engine, directory),
        f"resume={single.checkpoints}",
        "resume.weights_only=true",
        # As good as none: half of a bf16 weight's last place is larger by far.
        "optimizer.lr=1e-30",
        "optimizer.weight_decay=0",
        "train.steps=2",
        *saving(tmp_path / "weights"),
        "checkpoint.optimizer=false",
    )
    assert run.exit_code == 0, run.output
    assert [record.step for record in run.records(0)] == [1, 2]
    (kept,) = list_checkpoints(tmp_path / "weights")
    assert (kept.complete, has_optimizer(kept)) == (True, False)
    # Of 14 bytes a parameter, two.
    assert kept.size < seal_bytes(single.checkpoints) / 4
    assert run.reports[0].digests["weights"] == single.run.reports[0].digests["weights"]
