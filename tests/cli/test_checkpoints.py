"""``muon-offload checkpoints``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muon_offload_cli.cli.main import run
from tests.checkpoints import forged


def test_each_checkpoint_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged.save(tmp_path, 4)
    forged.save_plain(tmp_path, 6)
    (forged.save(tmp_path, 8, optimizer=False) / ".metadata").unlink()
    assert run(["checkpoints", str(tmp_path)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.split("  ")[-4:] == [
        "10.04 KiB",
        "complete",
        "4 ranks (tp2 ep2 etp2 dp2), engine disk, chunk 0.5 MiB",
        "2026-11-29T12:00:00+00:00",
    ]
    assert second.endswith("complete  by plain Megatron, no hashes to compare")
    assert "INCOMPLETE: .metadata is missing" in third
    assert "weights only" in third


def test_verify_reads_through_names_the_file_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = forged.save(tmp_path, 4)
    assert run(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert "complete, every byte compared" in capsys.readouterr().out
    data = bytearray(forged.CONTENT)
    data[5000] ^= 4
    (folder / "__0_0.distcp").write_bytes(data)
    assert run(["checkpoints", str(tmp_path)]) == 0
    assert run(["checkpoints", str(tmp_path), "--verify", "--json"]) == 2
    text = capsys.readouterr().out
    (told,) = json.loads(text[text.index("[") :])
    assert (told["step"], told["complete"]) == (4, False)
    assert told["fault"] == "__0_0.distcp is damaged between bytes 0 and 10240"


def test_a_place_without_any_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoints", str(tmp_path)]) == 0
    assert "no checkpoints" in capsys.readouterr().out
    assert run(["checkpoints", str(tmp_path / "none")]) == 2
