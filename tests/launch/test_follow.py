"""Reading rank files while ranks write them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from muon_offload_cli.launch.folder import RunFolder
from muon_offload_cli.launch.follow import Follower


def test_a_report_that_was_replaced_within_a_clock_tick_is_read(tmp_path: Path) -> None:
    folder = RunFolder(root=tmp_path)
    folder.reports.mkdir()
    path = folder.rank_report(0)
    follower = Follower(folder, range(1))
    for steps in (1, 2):
        # As a new file that got the number of the one before.
        path.write_text(json.dumps({"rank": 0, "steps": steps}))
        os.utime(path, ns=(1, 1))
        assert [event.report.steps for event in follower.poll()] == [steps]  # type: ignore[union-attr]
    assert list(follower.poll()) == []
