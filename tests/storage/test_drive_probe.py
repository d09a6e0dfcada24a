"""Measuring a drive: what is printed, and that nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muon_offload_cli.storage import drive_probe
from muon_offload_cli.units import MIB
from tests.fakes.drive import directory_on_a_drive


def test_every_way_of_every_size_is_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_probe, "REQUESTS", (MIB, 8 * MIB))
    monkeypatch.setattr(drive_probe, "THREADS", (1, 8))
    folder = directory_on_a_drive(tmp_path) / "made for it"
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert drive_probe.main([str(folder), "--size-mib", "32", "--seconds", "0"]) == 0
    first, *cases, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["size"] == 32 * MIB
    assert last == {"done": True}
    assert [(case["request_bytes"], case["threads"], case["way"]) for case in cases] == [
        (request, threads, way)
        for request in (MIB, 8 * MIB)
        for threads in (1, 8)
        for way in ("read", "write", "both")
    ]
    for case in cases:
        assert (case["read"] > 0) is (case["way"] != "write")
        assert (case["written"] > 0) is (case["way"] != "read")
    assert not folder.exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_stands_in_the_way_is_told_as_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert drive_probe.main([str(tmp_path / "file"), "--size-mib", "1"]) == 2
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert str(tmp_path / "file") in line["problems"][0]["what"]
