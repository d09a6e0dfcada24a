"""One case of a rule, and the facts of a machine that several subjects have cases for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muon_offload_cli.config.rules import DirectoryFacts, FileFacts, MachineFacts, MegatronFacts, PlannedFacts
from muon_offload_cli.config.rules.directory import FOLDERS
from muon_offload_cli.errors import Level

NOTHING_KNOWN = MachineFacts()
NATIVE = MachineFacts(megatron=MegatronFacts(version="0.20", root="/checkout", chunked_offloader=True))
ARGS = "megatron.args."
SCRIPT = "megatron.entrypoint=/my/pretrain.py"
UNREADABLE = (
    FileFacts(num_bytes=None),
    FileFacts(num_bytes=0),
    FileFacts(num_bytes=9, readable=False),
    FileFacts(num_bytes=None, is_folder=True),
)


def on_disks(*each: dict[str, object]) -> MachineFacts:
    directories = []
    for number, changes in enumerate(each):
        root = Path(f"/d{number or ''}")
        values: dict[str, object] = {
            "path": root / "s",
            "nearest": root,
            "exists": False,
            "mount_point": root,
            "device": number,
        }
        directories.append(DirectoryFacts(**(values | changes)))  # type: ignore[arg-type]
    return MachineFacts(
        directories=tuple(directories), planned=PlannedFacts(directory_bytes=(1000,) * len(each))
    )


def on_disk(**changes: object) -> MachineFacts:
    return on_disks(changes)


def in_folders(*keys: str, **changes: Any) -> MachineFacts:
    known = DirectoryFacts(path=Path("/f/x"), nearest=Path("/f"), **changes)
    return MachineFacts(
        folders=dict.fromkeys(keys or FOLDERS, known), planned=PlannedFacts(checkpoint_bytes=1000)
    )


TWO = "offload.directory=[/d/s,/d1/s]"


@dataclass
class Case:
    rule: str
    bad: str
    good: str = ""
    bad_facts: MachineFacts = field(default=NOTHING_KNOWN)
    good_facts: MachineFacts = field(default=NOTHING_KNOWN)
    level: Level = Level.ERROR
