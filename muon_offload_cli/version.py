"""The version, read by the build and by ``--version``."""

from __future__ import annotations

VERSION = "0.1.0"
