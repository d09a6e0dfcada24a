"""What the tests of the offloader share: a folder on a drive, and no thread or file left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.drive import directory_on_a_drive
from tests.offload.rig import our_threads


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return directory_on_a_drive(tmp_path) / "state"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Every test of this folder ends without our threads, open state files, or a folder of ours."""
    yield
    assert our_threads() == []
    held = [link for link in _open_files() if link.startswith(str(tmp_path))]
    assert held == []
    assert not (tmp_path / "state").exists()


def _open_files() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))  # noqa: PTH115 - Path.readlink strips " (deleted)" nowhere
        except OSError:
            continue
    return links
