"""When a job counts as standing still, and whom it is said to wait for."""

from __future__ import annotations

from muon_offload_cli.launch.figures import RankFigures
from muon_offload_cli.launch.quiet import LONG_STEPS, QuietWatch


def told(watch: QuietWatch, now: float) -> list[str]:
    return [str(notice) for notice in watch.look(now)]


def test_a_job_that_stands_still_is_told_once_with_the_rank_that_is_behind() -> None:
    figures = {0: RankFigures(steps=3), 1: RankFigures(steps=3)}
    watch = QuietWatch(figures, {}, quiet_s=60)
    assert told(watch, 100) == []
    figures[0].steps = 4
    assert told(watch, 101) == []
    assert told(watch, 160) == []
    assert told(watch, 161) == ["no step for 60 s: rank 1 has taken 3 of 4 steps"]
    assert told(watch, 500) == []
    figures[1].steps = 4
    assert told(watch, 501) == []
    # The longest step so far took 400 s.
    assert told(watch, 501 + LONG_STEPS * 400 - 1) == []
    assert told(watch, 501 + LONG_STEPS * 400) == ["no step for 2000 s: all ranks wait at step 4"]


def test_the_way_to_the_first_step_may_take_long() -> None:
    watch = QuietWatch({0: RankFigures()}, {}, quiet_s=60)
    assert told(watch, 0) == []
    assert told(watch, 1000) == []
