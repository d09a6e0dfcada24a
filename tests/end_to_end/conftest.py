"""What end-to-end tests share: folders on a drive, and no process of a run left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fake_torchrun
import pytest

from tests.end_to_end.runs import TP2_EP2, Run, train
from tests.fakes.drive import directory_on_a_drive


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A run and where it saved."""

    run: Run
    checkpoints: Path


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Four ranks, TP2/EP2, resident, a checkpoint every second step: what other runs are held against."""
    root = tmp_path_factory.mktemp("straight")
    words = (f"checkpoint.directory={root / 'saved'}", "checkpoint.interval=2")
    run = train(root / "run", *TP2_EP2, "offload=none", *words)
    assert run.exit_code == 0, run.output
    return Saved(run=run, checkpoints=root / "saved")


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
