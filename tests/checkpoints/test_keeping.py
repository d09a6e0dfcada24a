"""Putting checkpoints in place and deleting older ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from muon_offload_cli.checkpoints import keeping
from muon_offload_cli.checkpoints.keeping import delete_older, make_room, put_in_place
from muon_offload_cli.checkpoints.listing import list_checkpoints
from muon_offload_cli.checkpoints.names import SAVING, TRACKER, step_folder
from muon_offload_cli.checkpoints.seal import Seal
from tests.checkpoints import forged


def complete(directory: Path) -> list[int]:
    return [each.step for each in list_checkpoints(directory) if each.complete]


def test_a_saved_checkpoint_is_what_megatron_would_load(tmp_path: Path) -> None:
    forged.save(tmp_path, 4)
    assert (tmp_path / TRACKER).read_text() == "4"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000004", TRACKER]


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        forged.save(tmp_path, step)
    gone = delete_older(tmp_path, 8, keep=2)
    assert [path.name for path in gone] == ["iter_0000002", "iter_0000004"]
    assert complete(tmp_path) == [6, 8]
    assert not (tmp_path / SAVING).exists()


def test_nothing_but_older_sealed_checkpoints_is_deleted(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(forged.save(tmp_path, 1), elsewhere)
    step_folder(tmp_path, 1).symlink_to(elsewhere)
    forged.save_plain(tmp_path, 2)
    (forged.save(tmp_path, 3) / "__0_0.distcp").unlink()
    (tmp_path / "iter_notes").mkdir()
    for step in (4, 5, 9):
        forged.save(tmp_path, step)
    delete_older(tmp_path, 5, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "elsewhere",
        "iter_0000001",
        "iter_0000002",
        "iter_0000003",
        "iter_0000005",
        "iter_0000009",
        "iter_notes",
        TRACKER,
    }


def test_what_an_interrupted_save_left_makes_room(tmp_path: Path) -> None:
    forged.write_files(step_folder(tmp_path / SAVING, 6))
    assert list(make_room(tmp_path).iterdir()) == []


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    forged.save(tmp_path, 4)
    forged.save(tmp_path, 4, engine="host")
    sealed = Seal.read(step_folder(tmp_path, 4))
    assert sealed is not None
    assert sealed.engine == "host"
    assert not (tmp_path / SAVING).exists()


class EndError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("before", ["rename", "seal", "tracker", "rmtree"])
def test_an_end_at_any_moment_leaves_the_earlier_one_and_nothing_half_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    forged.save(tmp_path, 4)
    make_room(tmp_path)
    growing = step_folder(tmp_path / SAVING, 6)
    forged.write_files(growing)
    sealed = forged.seal(growing, 6)

    def die(*_: object, **__: object) -> None:
        raise EndError

    match before:
        case "rename":
            monkeypatch.setattr(Path, "rename", die)
        case "seal":
            monkeypatch.setattr(Seal, "write", die)
        case "tracker":
            monkeypatch.setattr(keeping, "replace_text", die)
        case "rmtree":
            monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(EndError):
        put_in_place(tmp_path, sealed)
    monkeypatch.undo()
    assert complete(tmp_path) == ([4] if before in ("rename", "seal") else [4, 6])
    # The next save cleans up and succeeds.
    forged_again = step_folder(tmp_path, 6)
    if forged_again.exists():
        shutil.rmtree(forged_again)
    forged.save(tmp_path, 6)
    assert complete(tmp_path) == [4, 6]
