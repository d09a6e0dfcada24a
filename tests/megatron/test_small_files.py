"""What a full drive does to the small files of a checkpoint, which Megatron writes by itself."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.checkpoints import small_files_told
from tests.checkpoints.forged import save

FULL = Path("/dev/full")


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_torch_on_a_full_drive_is_told_as_a_users_error(size: int) -> None:
    where = re.escape("checkpoint.directory=/saved cannot be written: ")
    with pytest.raises(UserError, match=where) as told, small_files_told(Path("/saved")):
        torch.save({"args": torch.zeros(size)}, str(FULL))
    assert told.value.exit_code == 3


def test_a_file_and_a_folder_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ENOSPC") as told, small_files_told(tmp_path):
        FULL.write_text("iteration")
    assert told.value.exit_code == 3
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"ENOTDIR .*: {tmp_path}/file/iter"), small_files_told(tmp_path):
        (tmp_path / "file" / "iter").mkdir()


@pytest.mark.parametrize(
    ("number", "saved", "left", "fix"),
    [
        (
            errno.ENOSPC,
            True,
            "Earlier checkpoints are whole.",
            "checkpoint.directory=/on/a/larger/drive resume=/",
        ),
        (errno.EDQUOT, False, "There is no earlier checkpoint.", "checkpoint.directory=/on/a/larger/drive"),
        (errno.ENOENT, False, "There is no earlier checkpoint.", "checkpoint.directory=/path/you/can/write"),
        (errno.EACCES, False, "There is no earlier checkpoint.", "checkpoint.directory=/path/you/can/write"),
        (
            errno.EROFS,
            True,
            "Earlier checkpoints are whole.",
            "checkpoint.directory=/path/you/can/write resume=",
        ),
    ],
)
def test_the_fix_follows_what_the_system_said_and_what_was_saved_before(
    tmp_path: Path, number: int, saved: bool, left: str, fix: str
) -> None:
    if saved:
        save(tmp_path, 2)
    with pytest.raises(UserError) as told, small_files_told(tmp_path):
        raise OSError(number, "", str(tmp_path / "iter"))
    (problem,) = told.value.problems
    assert problem.what.endswith(f": {tmp_path}/iter. {left}")
    assert problem.fix.startswith(fix)
    assert ("resume=" in problem.fix) == saved


def test_the_earlier_checkpoints_can_be_pasted_whatever_their_folders_name(tmp_path: Path) -> None:
    directory = tmp_path / "a b"
    save(directory, 2)
    with pytest.raises(UserError) as told, small_files_told(directory):
        raise OSError(errno.EROFS, "", str(directory / "iter"))
    (problem,) = told.value.problems
    assert problem.fix == f"checkpoint.directory=/path/you/can/write 'resume=\"{directory}\"'"


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="Connection closed"), small_files_told(Path("/saved")):
        raise RuntimeError("Connection closed by peer")
