"""The least time of a step's bytes, and what an earlier run says of the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from muon_offload_cli.errors import UserError
from muon_offload_cli.planner.cost import Bandwidth, parse_bandwidth, step_cost
from muon_offload_cli.planner.seen import compute_seconds
from muon_offload_cli.records import StepRecord
from tests.planner.plans import planner

NODE = replace(planner("tiny").plan().heaviest_node, each_way_bytes=1000, each_way_behind_bytes=200)


def test_reading_and_writing_overlap_so_the_slower_one_counts() -> None:
    assert step_cost(NODE, Bandwidth(read=100, written=1000, source="")).floor_s == 10
    assert step_cost(NODE, Bandwidth(read=1000, written=100, source="")).floor_s == 10


def test_only_what_staging_buffers_hold_passes_behind_forward_and_backward() -> None:
    even = Bandwidth(read=100, written=100, source="")
    cost = step_cost(NODE, even)
    assert (cost.floor_s, cost.behind_s, cost.exposed_s) == (10, 2, 8)
    cost = step_cost(NODE, even, compute_s=0.5)
    assert (cost.behind_s, cost.exposed_s) == (0.5, 9.5)


def test_a_bandwidth_is_two_numbers_in_gigabytes() -> None:
    assert parse_bandwidth("1.5,2") == Bandwidth(read=1.5e9, written=2e9, source="given")


@pytest.mark.parametrize("text", ["0,1", "1,0", "-1,1", "nan,1", "inf,1", "1", "1,2,3", "fast,slow", ""])
def test_a_bandwidth_that_moves_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--bandwidth") as caught:
        parse_bandwidth(text)
    assert caught.value.exit_code == 2


def test_the_time_outside_the_drive_is_the_median_without_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    steps = [(50.0, 1.0), (3.0, 1.0), (4.0, 1.0), (9.0, 1.0)]
    lines = [
        StepRecord(step=number, seconds=seconds, wait_s=wait).to_json()
        for number, (seconds, wait) in enumerate(steps, 1)
    ]
    (tmp_path / "metrics" / "rank_0.jsonl").write_text("\n".join(lines) + "\n")
    assert compute_seconds(tmp_path) == 3.0


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics"):
        compute_seconds(tmp_path)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "rank_0.jsonl").write_text("{half a li")
    with pytest.raises(UserError, match=r"rank_0\.jsonl cannot be read"):
        compute_seconds(tmp_path)
