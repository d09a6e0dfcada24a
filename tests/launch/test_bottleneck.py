"""What bounded a run's steps."""

from __future__ import annotations

import json

import pytest

from muon_offload_cli.config.schema import Config, Engine
from muon_offload_cli.launch.bottleneck import Bound, find_bottleneck
from muon_offload_cli.launch.figures import RankFigures
from muon_offload_cli.records import StepRecord


def ran(*steps: StepRecord) -> RankFigures:
    figures = RankFigures()
    # The first step pays for warm-up and must not count.
    for step in (StepRecord(step=1, seconds=99, wait_s=99), *steps):
        figures.add(step)
    return figures


def step(seconds: float, wait_s: float, busy_s: float, moved: int = 0) -> StepRecord:
    return StepRecord(
        step=2,
        seconds=seconds,
        wait_s=wait_s,
        io_wait_s=min(wait_s, busy_s),
        io_busy_s=busy_s,
        bytes_read=moved // 2,
        bytes_written=moved // 2,
    )


def config(engine: Engine = Engine.disk, **offload: str) -> Config:
    made = Config(recipe="r")
    made.offload.engine = engine
    made.train.global_batch = 8
    for key, value in offload.items():
        setattr(made.offload, key, value)
    return made


@pytest.mark.parametrize(
    ("seconds", "wait_s", "busy_s", "bound", "hidden"),
    [
        (10.0, 9.0, 9.5, Bound.DRIVES, 1 - 9.0 / 9.5),
        (10.0, 0.4, 8.0, Bound.COMPUTE, 0.95),
        (1.0, 0.3, 0.1, Bound.COPIES, 0.0),
        (1.0, 0.3, 0.0, Bound.COPIES, None),
        (1.0, 0.0, 0.0, Bound.COMPUTE, None),
    ],
)
def test_the_bound_is_what_the_step_stood_still_for(
    seconds: float, wait_s: float, busy_s: float, bound: Bound, hidden: float | None
) -> None:
    found = find_bottleneck(config(), [ran(step(seconds, wait_s, busy_s))])
    assert found is not None
    assert (found.bound, found.step_s, found.wait_s) == (bound, seconds, wait_s)
    assert found.hidden == pytest.approx(hidden)
    assert (found.advice == "") == (bound is Bound.COMPUTE)


def test_the_slowest_rank_is_told_with_its_rates() -> None:
    quick, slow = ran(step(1, 0, 1)), ran(step(4, 3, 4, 8 << 30), step(4, 3, 4, 8 << 30))
    found = find_bottleneck(config(), [quick, slow])
    assert found is not None
    assert found.text == (
        "bound by drives: a step took 4 s and stood still for state in 3 s of it; "
        "8.00 GiB a step and rank moved at 2.00 GiB/s, 25% of that time hidden"
    )
    assert json.loads(json.dumps(found.bound)) == "drives"


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        (config(), "offload.host_memory_gb=auto"),
        (config(host_memory_gb="4"), "train.global_batch=16, or offload.directory on more drives"),
        (config(Engine.mapped), "offload.engine=disk"),
    ],
)
def test_the_advice_is_a_setting_that_is_not_in_force_yet(asked: Config, advice: str) -> None:
    found = find_bottleneck(asked, [ran(step(10, 9, 9))])
    assert found is not None
    assert found.advice == advice


def test_resident_runs_and_single_steps_are_not_judged() -> None:
    assert find_bottleneck(config(Engine.none), [ran(step(1, 0, 0))]) is None
    assert find_bottleneck(config(), [ran()]) is None
    assert find_bottleneck(config(), []) is None
