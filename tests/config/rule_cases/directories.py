"""Cases of config/rules/directories.py."""

from __future__ import annotations

from muon_offload_cli.errors import Level
from tests.config.rule_cases.case import TWO, Case, on_disk, on_disks

CASES = [
    Case("directory-space", "", "", on_disk(free_bytes=999), on_disk(free_bytes=1000)),
    Case("directory-space", "", "", on_disk(free_bytes=0), on_disk(free_bytes=0, kind="proc")),
    Case("directory-space", TWO, TWO, on_disks({"free_bytes": 1000}, {"free_bytes": 999}), on_disk()),
    # Each filesystem by itself, and one that two of them share by what both need.
    Case(
        "directory-space",
        TWO,
        TWO,
        on_disks({"free_bytes": 1999}, {"free_bytes": 1999, "device": 0}),
        on_disks({"free_bytes": 1000}, {"free_bytes": 1000}),
    ),
    Case("directory-list", "offload.directory=[/d/s,/d/s]", TWO),
    Case("directory-list", "offload.directory=[/d/s,/e,/d//s]", "offload.directory=[/d/s,/d/s] offload=host"),
    Case("directory-list", "'offload.directory=[]'", TWO),
    Case("directory-drives", TWO, TWO, on_disks({}, {"device": 0}), on_disks({}, {}), Level.WARNING),
    Case(
        "directory-speed",
        TWO,
        TWO,
        on_disks({"bytes_per_s": 5e9}, {"bytes_per_s": 3e9}),
        on_disks({"bytes_per_s": 5e9}, {"bytes_per_s": 4.5e9}),
        Level.NOTE,
    ),
]
