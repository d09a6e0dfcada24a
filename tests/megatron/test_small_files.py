"""What a full drive does to the small files of a checkpoint, which Megatron writes by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.checkpoints import small_files_told

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


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="Connection closed"), small_files_told(Path("/saved")):
        raise RuntimeError("Connection closed by peer")
