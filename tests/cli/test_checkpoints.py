"""``muon-offload checkpoints``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muon_offload_cli.checkpoints.names import SAVING, SEAL, step_folder
from muon_offload_cli.cli.main import run
from tests.checkpoints import forged


def test_each_checkpoint_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged.save(tmp_path, 4)
    forged.save_plain(tmp_path, 6)
    (forged.save(tmp_path, 8, optimizer=False) / ".metadata").unlink()
    assert run(["checkpoints", str(tmp_path)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.split("  ")[-4:] == [
        "10.05 KiB",
        "complete",
        "4 ranks (tp2 ep2 etp2 dp2), engine disk, chunk 0.5 MiB",
        "2026-11-29T12:00:00+00:00",
    ]
    assert second.endswith("complete  by plain Megatron, no hashes to compare")
    assert "INCOMPLETE: .metadata is missing" in third
    assert "weights only" in third


def test_one_rank_and_a_checkpoint_in_its_folders_place_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = forged.save(tmp_path, 4, world_size=1, layout={"tp": 1, "dp": 1})
    assert run(["checkpoints", str(tmp_path)]) == 0
    assert "  1 rank, engine disk" in capsys.readouterr().out
    assert run(["checkpoints", str(folder)]) == 2
    assert f"fix: muon-offload checkpoints {tmp_path}" in capsys.readouterr().err


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


def test_verify_exits_2_for_what_sizes_and_the_seal_tell_but_not_for_a_save_that_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged.write_files(step_folder(tmp_path / SAVING, 8))
    assert run(["checkpoints", str(tmp_path), "--verify"]) == 0
    folder = forged.save(tmp_path / "short", 4)
    (folder / "__0_0.distcp").write_bytes(b"short")
    (forged.save(tmp_path / "seal", 4) / SEAL).write_text("{")
    capsys.readouterr()
    for name in ("short", "seal"):
        assert run(["checkpoints", str(tmp_path / name)]) == 0
        assert run(["checkpoints", str(tmp_path / name), "--verify"]) == 2
        assert "INCOMPLETE" in capsys.readouterr().out


def test_a_place_without_any_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoints", str(tmp_path)]) == 0
    assert "no checkpoints" in capsys.readouterr().out
    (tmp_path / "file").touch()
    for name, told in (
        ("none", "there is no such folder"),
        ("file", "that is a file, not a folder"),
        ("x" * 300, "File name too long"),
    ):
        assert run(["checkpoints", str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("resume={}/nowhere", "there is no such folder"),
        ("resume={}/empty", "holds no checkpoint"),
        ("resume={}/weights", "saved without optimizer state"),
        ("resume={}/other", "was saved with model.num_layers=9"),
        ("resume=7 checkpoint.directory={}/whole", "Complete steps: 4."),
        ("resume={}/damaged", ".metadata is missing"),
        ("checkpoint.directory={}/file", "is a file"),
        ("resume=none checkpoint.directory={}/whole", "holds checkpoints (the last of step 4)"),
    ],
)
def test_what_a_run_would_go_on_from_is_judged_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    forged.save(tmp_path / "weights", 4, optimizer=False)
    forged.save(tmp_path / "other", 4, model={"model.num_layers": 9})
    forged.save(tmp_path / "whole", 4)
    (forged.save(tmp_path / "damaged", 4) / ".metadata").unlink()
    given = words.format(tmp_path).split()
    code = 3 if words.startswith("checkpoint.directory") else 2
    asked = ["check-config", "recipe=tiny", "device=cpu", "train.steps=9", "optimizer.lr=-1", *given]
    assert run(asked) == code
    printed = capsys.readouterr()
    assert told in printed.out + printed.err
    # With everything else that is wrong.
    assert "optimizer.lr=-1" in printed.out + printed.err


def test_the_checkpoint_that_a_run_would_take_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged.save(tmp_path, 4)
    assert run(["check-config", "recipe=tiny", "device=cpu", "train.steps=9", f"resume={tmp_path}"]) == 0
    printed = capsys.readouterr()
    assert f"takes step 4 of {tmp_path}" in printed.out + printed.err


def test_a_run_that_goes_on_needs_no_weights_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[1] / "config" / "hf" / "qwen3_4b"
    words = ["check-config", "recipe=tiny", "device=cpu", "train.steps=9", "model=from_hf", "data=mock"]
    words += [f"model.from_hf={folder}", f"checkpoint.directory={tmp_path}", "resume=auto"]
    run(words)
    assert "holds no weights" in capsys.readouterr().err
    forged.save_plain(tmp_path, 4)
    run(words)
    printed = capsys.readouterr()
    assert f"takes step 4 of {tmp_path}" in printed.out + printed.err
    assert "holds no weights" not in printed.err
