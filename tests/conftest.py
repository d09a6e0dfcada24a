"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# A deadline would time the machine, and fail a test because another one is at work.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
