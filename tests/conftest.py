"""What all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# A deadline would time the machine, and fail a test because another one is at work; so would this check.
settings.register_profile("no deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no deadline")

# Workers of xdist have it, as many a shell does: what goes into pipes would be cut to a terminal's width.
os.environ.pop("COLUMNS", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest where several run at a time, or one of them would end alone."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: "end_to_end" not in item.path.parts)
