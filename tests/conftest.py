"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# A deadline would time the machine, and fail a test because another one is at work.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# xdist tells its workers how wide the terminal is, and whatever they print into pipes would be cut to fit.
os.environ.pop("COLUMNS", None)
