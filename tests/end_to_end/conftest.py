"""What end-to-end tests share: folders on a drive, and no process of a run left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_torchrun
import pytest

from tests.end_to_end import runs
from tests.end_to_end.runs import TP2_EP2, train
from tests.end_to_end.saving import ONE, Saved, Started, complete, engine_words, saving
from tests.fakes.drive import directory_on_a_drive


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Four ranks, TP2/EP2, resident, a checkpoint every second step: what other runs are held against."""
    root = tmp_path_factory.mktemp("straight")
    words = (f"checkpoint.directory={root / 'saved'}", "checkpoint.interval=2")
    run = train(root / "run", *TP2_EP2, "offload=none", *words)
    assert run.exit_code == 0, run.output
    return Saved(run=run, checkpoints=root / "saved")


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One rank, six steps, saved at 2, 4 and 6, kept 2."""
    root = tmp_path_factory.mktemp("single")
    state = directory_on_a_drive(root) / "state"
    run = train(
        root / "run",
        *ONE,
        *engine_words("disk", state),
        *saving(root / "saved", interval=2),
        "checkpoint.keep=2",
    )
    assert run.exit_code == 0, run.output
    assert complete(root / "saved") == [4, 6]
    return Saved(run=run, checkpoints=root / "saved")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    begun: list[Started] = []

    def run(*words: str) -> Started:
        folder = tmp_path / f"run_{len(begun)}"
        process = subprocess.Popen(
            runs.command(folder, *words),
            env=runs.environment(),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        begun.append(Started(process=process, folder=folder))
        return begun[-1]

    yield run
    for each in begun:
        each.process.kill()
        each.process.communicate()


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
