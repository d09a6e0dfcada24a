"""What end-to-end tests share: folders on a drive, and no process of a run left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fake_torchrun
import pytest

from tests.fakes.drive import directory_on_a_drive


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Folder for state files, which a run makes and removes."""
    return directory_on_a_drive(tmp_path) / "state"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Every test of this folder ends without a process of its runs and without bytes of state."""
    yield
    assert fake_torchrun.processes_of(tmp_path) == []
    assert not (tmp_path / "state").exists()
