"""The shipped files are found from a wheel and a checkout; the offload directory has one default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muon_offload_cli.config import locations
from muon_offload_cli.config.locations import default_offload_directory, shipped_directory
from muon_offload_cli.errors import UserError


def test_the_wheels_data_folder_is_found_before_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "muon_offload_cli"
    (tmp_path / "conf").mkdir()
    monkeypatch.setattr(locations, "_PACKAGE", package)
    assert shipped_directory("conf") == tmp_path / "conf"
    (package / "data" / "conf").mkdir(parents=True)
    assert shipped_directory("conf") == package / "data" / "conf"


def test_an_installation_without_its_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_PACKAGE", tmp_path / "muon_offload_cli")
    with pytest.raises(UserError, match="the installation has no recipes/ folder"):
        shipped_directory("recipes")


def test_scratch_is_the_default_place_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/mnt/nvme0/me")
    assert default_offload_directory() == Path("/mnt/nvme0/me/muon_offload")


def test_a_relative_scratch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "scratch")
    with pytest.raises(UserError, match="SCRATCH=scratch is no absolute path"):
        default_offload_directory()


@pytest.mark.parametrize(
    ("kind", "refused"), [("ext4", False), ("overlay", False), ("tmpfs", True), ("ramfs", True)]
)
def test_tmp_is_the_default_only_if_it_is_a_disk(
    kind: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCRATCH", raising=False)
    monkeypatch.setattr(locations, "_kind_of_memory", lambda path: kind if refused else None)
    if refused:
        with pytest.raises(UserError, match=f"/tmp is a {kind}") as caught:
            default_offload_directory()
        assert caught.value.exit_code == 3
    else:
        assert default_offload_directory() == Path(f"/tmp/muon_offload_{os.getuid()}")
