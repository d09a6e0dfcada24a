"""Judging a run from reports and records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.launch.figures import RankFigures
from muon_offload_cli.launch.verdict import Verdict, judge
from muon_offload_cli.records import RankReport, StepRecord

STATE = 8 << 20


def config(engine: Engine = Engine.disk, steps: int = 3) -> Config:
    made = Config(recipe="r")
    made.train.steps = steps
    made.offload.engine = engine
    return made


def report(rank: int, engine: Engine = Engine.disk, steps: int = 3, **more: object) -> RankReport:
    on_disk = engine in (Engine.disk, Engine.mapped)
    made = RankReport(
        rank=rank,
        engine=engine.name,
        muon_parameters=STATE // 8,
        muon_state_bytes=STATE,
        disk_bytes=STATE if on_disk else 0,
        host_bytes=STATE if engine is Engine.host else 0,
        chunks=5,
        steps=steps,
        steps_from_backend=0 if engine is Engine.none else steps,
        finished=True,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def figures(engine: str, *chunks: int) -> RankFigures:
    made = RankFigures()
    for step, moved in enumerate(chunks, 1):
        made.add(StepRecord(step=step, engine=engine, chunks=moved))
    return made


def verdict_of(
    asked: Config, *reports: RankReport, exit_code: int = 0, num_ranks: int | None = None
) -> Verdict:
    ranks = range(num_ranks or len(reports))
    return judge(asked, {r.rank: r for r in reports}, {}, ranks=ranks, exit_code=exit_code)


@pytest.mark.parametrize(
    ("engine", "place"),
    [
        (Engine.disk, "state on disk (16.00 MiB)"),
        (Engine.mapped, "state on disk (16.00 MiB)"),
        (Engine.host, "state in host memory (16.00 MiB)"),
        (Engine.none, "resident, as asked"),
    ],
)
def test_every_rank_in_the_place_asked_for_is_success(engine: Engine, place: str) -> None:
    found = verdict_of(config(engine), report(0, engine), report(1, engine))
    assert (found.success, found.exit_code) == (True, 0)
    assert found.headline == f"2 of 2 ranks: {place}"


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": Engine.none, "disk_bytes": 0, "gpu_bytes": STATE, "steps_from_backend": 0},
        {"steps_from_backend": 0},
        {"steps_from_backend": 2},
        {"disk_bytes": 0},
        {"disk_bytes": STATE // 2},
        {"disk_bytes": 0, "host_bytes": STATE},
        {"engine": Engine.host},
    ],
)
def test_a_rank_that_quietly_kept_its_state_in_memory_fails_and_is_named(changes: dict[str, object]) -> None:
    found = verdict_of(config(), report(0), report(1, **changes))
    assert (found.success, found.exit_code) == (False, 4)
    assert found.headline.startswith("1 of 2 ranks: state on disk (8.00 MiB); rank 1 kept ")
    assert "in memory" in found.ranks[1].verdict


def test_records_that_contradict_the_report_fail_the_rank() -> None:
    seen = {0: figures("disk", 5, 5, 5), 1: figures("disk", 5, 0, 5)}
    found = judge(config(), {0: report(0), 1: report(1)}, seen, ranks=range(2), exit_code=0)
    assert [row.fine for row in found.ranks] == [True, False]
    assert "2 of 3 steps from disk" in found.ranks[1].verdict


def test_a_host_budget_may_hold_everything() -> None:
    asked = config()
    asked.offload.host_memory_gb = "auto"
    found = verdict_of(asked, report(0, disk_bytes=0, host_bytes=STATE), report(1))
    assert found.success
    assert found.headline == "2 of 2 ranks: state on disk (8.00 MiB) and in host memory (8.00 MiB)"


def test_the_steps_of_a_rank_that_died_are_counted_from_its_records() -> None:
    cut = report(0, steps=0, steps_from_backend=0, finished=False)
    found = judge(config(), {0: cut}, {0: figures("disk", 5, 5)}, ranks=range(1), exit_code=1)
    assert (found.ranks[0].steps_from_backend, found.ranks[0].steps) == (2, 2)


def test_a_rank_without_muon_parameters_is_fine_and_says_so() -> None:
    empty = report(1, muon_parameters=0, muon_state_bytes=0, disk_bytes=0, chunks=0, steps_from_backend=0)
    found = verdict_of(config(), report(0), empty)
    assert found.success
    assert found.headline == "2 of 2 ranks: state on disk (8.00 MiB); rank 1 without Muon parameters"
    assert found.ranks[1].detail == "no Muon parameters"


def test_a_run_in_which_no_rank_has_muon_parameters_did_not_do_what_was_asked() -> None:
    found = verdict_of(config(), report(0, muon_parameters=0, muon_state_bytes=0, disk_bytes=0))
    assert found.exit_code == 4
    assert "no parameters that Muon owns" in found.headline


def test_a_rank_without_a_report_fails() -> None:
    found = verdict_of(config(), report(0), num_ranks=2)
    assert found.exit_code == 4
    assert found.ranks[1].verdict == "wrote no report"


@pytest.mark.parametrize("changes", [{"finished": False, "steps": 2}, {"steps": 2, "steps_from_backend": 2}])
def test_a_rank_that_took_fewer_steps_fails(changes: dict[str, object]) -> None:
    assert "2 of 3 steps" in verdict_of(config(), report(0, **changes)).headline


def test_a_resumed_run_takes_only_the_steps_that_are_left() -> None:
    asked = config(steps=10)
    asked.resume.source = "/checkpoint"
    assert verdict_of(asked, report(0, steps=5, last_step=10)).success


def test_a_resumed_run_that_ends_before_the_last_step_fails() -> None:
    asked = config(steps=10)
    asked.resume.source = "/checkpoint"
    found = verdict_of(asked, report(0, steps=0, last_step=5))
    assert found.exit_code == 4
    assert "finished at step 5 of 10" in found.headline


def test_torchrun_must_agree() -> None:
    found = verdict_of(config(), report(0), exit_code=1)
    assert found.exit_code == 4
    assert found.headline.endswith("torchrun exited with 1")


def test_where_a_rank_died_the_headline_names_no_other() -> None:
    reports = {rank: report(rank, finished=False, steps=0) for rank in range(3)}
    found = judge(
        config(), reports, {}, ranks=range(3), exit_code=1, endings={1: "died of signal 9 (SIGKILL)"}
    )
    assert found.headline == (
        "0 of 3 ranks did what was asked for; rank 1 died of signal 9 (SIGKILL): 0 of 3 steps"
    )


@given(
    steps=st.integers(0, 4),
    from_backend=st.integers(0, 4),
    disk_bytes=st.sampled_from([0, 1, STATE - 1, STATE, STATE + 4096]),
    finished=st.booleans(),
    engine=st.sampled_from(Engine),
    exit_code=st.sampled_from([0, 1]),
)
def test_success_needs_every_condition_at_once(
    steps: int, from_backend: int, disk_bytes: int, finished: bool, engine: Engine, exit_code: int
) -> None:
    one = report(
        0,
        steps=steps,
        steps_from_backend=from_backend,
        disk_bytes=disk_bytes,
        finished=finished,
        engine=engine,
    )
    right = (
        steps == from_backend == 3
        and disk_bytes >= STATE
        and finished
        and engine is Engine.disk
        and exit_code == 0
    )
    assert verdict_of(config(), one, exit_code=exit_code).success == right
