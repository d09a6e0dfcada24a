"""What the tests of Megatron's side share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.drive import directory_on_a_drive


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return directory_on_a_drive(tmp_path)
