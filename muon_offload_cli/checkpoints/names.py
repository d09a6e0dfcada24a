"""Where things lie below a checkpoint directory. Folder and tracker names are Megatron's."""

from __future__ import annotations

import os
import re
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
SEAL = "muon_offload.json"
SAVING = ".saving"
"""Folder in which a checkpoint grows; it is moved out of it when every file is on the drive."""
LOCK = ".lock"
"""File that a run holds locked while it may save."""

TENSORS = ".distcp"
"""How names of files with tensors end (torch/distributed/checkpoint/filesystem.py)."""

_STEP_FOLDER = re.compile(r"iter_(\d{7,})")


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of a step (`get_checkpoint_name` in megatron/training/checkpointing.py)."""
    return directory / f"iter_{step:07d}"


def step_of(folder: Path) -> int | None:
    """Return the step that a folder is named after, None for any other name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def replace_text(path: Path, text: str) -> None:
    """Put `text` where `path` is, in one rename and down to the drive: no reader ever sees half of it.

    Raises:
        OSError: As the file system reports it; what stood there before still does.
    """
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the drive: a rename is not there after a power cut without it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
