"""Holding a run against what `disk-plan` says of it, byte for byte."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from typing import Any

from muon_offload_cli.cli import main
from tests.end_to_end.runs import SMALL, Run

COLUMNS = ("muon_parameters", "muon_state_bytes", "disk_bytes", "host_bytes", "gpu_bytes", "chunks")


def assert_as_planned(run: Run, *words: str) -> None:
    """Plan what `words` ask for and compare every rank's bytes; on disk, what each step moved too."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main.run(["disk-plan", "--json", *SMALL, *words]) == 0
    planned = {rank: kind for kind in json.loads(out.getvalue())["kinds"] for rank in kind["ranks"]}
    assert run.reports.keys() == planned.keys()
    for rank, report in run.reports.items():
        assert {name: planned[rank][name] for name in COLUMNS} == {
            name: getattr(report, name) for name in COLUMNS
        }
        # Adam counts its steps in 4 bytes a tensor, of which there are some.
        left_over = report.adam_state_bytes - planned[rank]["adam_state_bytes"]
        assert 0 <= left_over < 400
        assert left_over % 4 == 0
        if report.disk_bytes:
            _moved_as_planned(planned[rank]["each_way_bytes"], run.records(rank)[1:])


def _moved_as_planned(each_way_bytes: int, records: list[Any]) -> None:
    """Compare steps after the first, which also counts what was read ahead of it.

    Forward and backward sweeps keep different chunks in the windows; two of them make the mean.
    """
    for first, second in itertools.pairwise(records):
        read, written = first.bytes_read + second.bytes_read, first.bytes_written + second.bytes_written
        assert read == written in (2 * each_way_bytes, 2 * each_way_bytes + 1)
