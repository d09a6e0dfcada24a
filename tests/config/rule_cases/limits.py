"""Cases of config/rules/limits.py."""

from __future__ import annotations

from dataclasses import replace

from muon_offload_cli.config.rules import MachineFacts
from muon_offload_cli.errors import Level
from muon_offload_cli.machine.limits import ProcessLimits
from muon_offload_cli.units import GIB
from tests.config.rule_cases.case import Case, on_disk


def under(**limits: int) -> MachineFacts:
    return MachineFacts(limits=ProcessLimits(**limits))


FILES_OF_A_TENTH = replace(on_disk(), limits=ProcessLimits(file_bytes=100))
FILES_OF_HALF = replace(on_disk(), limits=ProcessLimits(file_bytes=500))

CASES = [
    Case("process-limits", "", "", under(open_files=64), under(open_files=1024)),
    Case("process-limits", "", "", under(address_bytes=4 * GIB)),
    Case("process-limits", "", "", under(open_files=512), level=Level.NOTE),
    Case("process-limits", "", "", under(address_bytes=64 * GIB), level=Level.NOTE),
    Case("process-limits", "", "", under(max_maps=1000), level=Level.NOTE),
    Case("file-size-limit", "", "", FILES_OF_A_TENTH),
    Case("file-size-limit", "", "", FILES_OF_HALF, level=Level.NOTE),
]
