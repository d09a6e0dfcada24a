"""Run Megatron's own tests of its offloader with the mapped subclass in its place.

In a checkout, with its `tests` package found first::

    MAPPED_DIRECTORY=/nvme/mapped PYTHONPATH=$PWD:$REPOSITORY:$REPOSITORY/tests/megatron \\
        python -m pytest --noconftest -o addopts= -p mapped_plugin \\
        tests/unit_tests/test_optimizer_state_offloading.py

Without MAPPED_DIRECTORY the class is Megatron's, for comparison. docs/megatron.md says what cannot pass.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    directory = os.environ.get("MAPPED_DIRECTORY")
    if not directory:
        return
    # Imported here: pytest loads plugins before it knows what it runs.
    from muon_offload_cli.megatron.native_installation import NativeInstallation
    from muon_offload_cli.offload.settings import OffloadSettings

    installation = NativeInstallation(OffloadSettings(engine="mapped", directories=(Path(directory),)))
    # The class alone: these tests build configs of their own.
    installation.leave_configs_alone()
    config.add_cleanup(installation.close)
