"""Cases of config/rules/directory.py."""

from __future__ import annotations

from pathlib import Path

from muon_offload_cli.config.rules import MachineFacts
from muon_offload_cli.errors import Level
from tests.config.rule_cases.case import TWO, Case, in_folders, on_disk, on_disks

CASES = [
    Case("directory-absolute", "offload.directory=a", "offload.directory=/a"),
    Case(
        "directory-absolute",
        "offload.directory=a",
        "offload.directory=a offload=host",
        MachineFacts(working_directory=Path("/home/u")),
    ),
    Case("directory-absolute", "offload.directory="),
    Case("directory-absolute", "'offload.directory=\"~/x\"'"),
    Case("directory-folder", "", "", on_disk(is_folder=False), on_disk()),
    Case("directory-memory", "", "", on_disk(is_memory=True, kind="tmpfs"), on_disk()),
    Case(
        "directory-memory", "offload=mapped", "offload=host", on_disk(is_memory=True, kind="ramfs"), on_disk()
    ),
    Case("directory-pseudo", "", "", on_disk(kind="proc"), on_disk()),
    Case("directory-writable", "", "", on_disk(writable=False), on_disk(exists=False)),
    Case("directory-writable", "", "", on_disk(writable=False, exists=True), on_disk(exists=True)),
    Case("directory-writable", "", "", on_disk(writable=False, read_only=True), on_disk()),
    Case("directory-link", "", "", on_disk(dangling=Path("/nope")), on_disk()),
    Case("directory-link", "", "", in_folders(dangling=Path("/no pe")), in_folders()),
    Case(
        "directory-root",
        "offload.directory=/d/s",
        "offload.directory=/d/s",
        on_disk(mount_point=Path("/")),
        on_disk(mount_point=Path("/"), dangling=Path("/nope")),
        Level.WARNING,
    ),
    Case("directory-folder", "", "", in_folders(is_folder=False), in_folders()),
    Case("directory-pseudo", "", "", in_folders(kind="proc"), in_folders()),
    Case("directory-writable", "", "", in_folders(writable=False), in_folders(is_folder=False)),
    Case("directory-keeps", "", "", on_disk(write_error="came back changed"), on_disk(write_error="")),
    Case(
        "directory-absolute",
        "offload.directory=[/d/s,a,b/c]",
        TWO,
        MachineFacts(working_directory=Path("/h")),
    ),
    Case("directory-memory", TWO, TWO, on_disks({}, {"is_memory": True, "kind": "tmpfs"}), on_disks({}, {})),
    Case("directory-writable", TWO, TWO, on_disks({}, {"writable": False}), on_disks({}, {})),
    Case(
        "directory-root",
        "offload.directory=/d/s",
        "",
        on_disk(mount_point=Path("/")),
        on_disk(mount_point=Path("/")),
        Level.WARNING,
    ),
    Case(
        "directory-root",
        TWO,
        TWO,
        on_disks({}, {"mount_point": Path("/")}),
        on_disks({}, {"mount_point": Path("/"), "exists": True}),
        Level.WARNING,
    ),
    Case("directory-network", "", "", on_disk(is_network=True, kind="nfs4"), on_disk(), Level.WARNING),
    Case("directory-overlay", "", "", on_disk(kind="overlay"), on_disk(), Level.NOTE),
    Case("direct-io", "", "", on_disk(direct_io=False), on_disk(direct_io=True), Level.WARNING),
    Case("direct-io", "", "offload=mapped", on_disk(direct_io=False), on_disk(), Level.WARNING),
]
