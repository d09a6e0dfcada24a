"""Which checkpoints a directory holds, which are complete, and why the others are not."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.checkpoints.names import SAVING, SEAL, TRACKER, step_folder, step_of
from muon_offload_cli.checkpoints.seal import Seal, hash_piece

MEGATRON_LAST = "metadata.json"
"""Megatron writes this file when all others are there (megatron/core/dist_checkpointing/core.py)."""
TORCH_METADATA = ".metadata"
"""Names, shapes and places of all tensors, pickled (torch/distributed/checkpoint/filesystem.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A checkpoint, or what is left of one.

    Attributes:
        step: The step it is named after.
        folder: Where it lies.
        fault: Why it cannot be used; empty if it is complete.
        seal: What it says of itself; None for one that plain Megatron wrote.
        size: Bytes on the drive.
    """

    step: int
    folder: Path
    fault: str
    seal: Seal | None
    size: int

    @property
    def complete(self) -> bool:
        """It can be loaded, as far as names and sizes tell."""
        return not self.fault

    @property
    def growing(self) -> bool:
        """It lies where saves grow: an interrupted one, which never stood in a checkpoint's place."""
        return self.folder.parent.name == SAVING


def list_checkpoints(directory: Path) -> list[Found]:
    """Return everything in `directory` that is or was meant to be a checkpoint, by step, oldest first.

    A save that was interrupted is among them. File contents are not read.

    Raises:
        OSError: The directory cannot be read. One that does not exist holds nothing.
    """
    tracked = _tracked_step(directory)
    found = [
        look_at(folder, step, tracked)
        for folder in _entries(directory)
        if (step := step_of(folder)) is not None and _is_there(folder)
    ]
    growing = directory / SAVING
    found += [
        _broken(folder, step, "its save was interrupted")
        for folder in (_entries(growing) if growing.is_dir() else ())
        if (step := step_of(folder)) is not None and folder.is_dir()
    ]
    return sorted(found, key=lambda each: (each.step, each.complete))


def interrupted_bytes(directory: Path) -> int:
    """Return the bytes that an interrupted save or deletion left; the next save removes them first."""
    return _size_of(directory / SAVING)


def _entries(directory: Path) -> list[Path]:
    """Return what lies in `directory`; nothing where it is not there, or is no more: a run may be saving."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def look_at(folder: Path, step: int, tracked: int | None) -> Found:
    """Judge one folder by the names and sizes in it.

    Args:
        folder: An ``iter_N`` folder, or what stands in its place.
        step: Its N.
        tracked: Newest step that Megatron's tracker file speaks of; None: there is none.
    """
    if not folder.is_dir():
        link = folder.is_symlink()
        return _broken(folder, step, "it is a link that leads to no folder" if link else "it is no folder")
    try:
        seal = Seal.read(folder)
    except (ValueError, OSError) as error:
        reason = f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        return _broken(folder, step, f"{SEAL}: {reason}")
    if seal is None:
        fault = _unsealed_fault(folder, step, tracked)
    elif seal.step != step:
        fault = f"it was sealed as {step_folder(folder.parent, seal.step).name}, and has been renamed"
    else:
        fault = size_fault(folder, seal)
    size = _size_of(folder) if seal is None or fault else seal.nbytes
    return Found(step=step, folder=folder, fault=fault, seal=seal, size=size)


def _broken(folder: Path, step: int, fault: str) -> Found:
    return Found(step=step, folder=folder, fault=fault, seal=None, size=_size_of(folder))


def _unsealed_fault(folder: Path, step: int, tracked: int | None) -> str:
    for name in (MEGATRON_LAST, TORCH_METADATA):
        if not (folder / name).is_file():
            return f"{name} is missing: its save did not end, or it is no torch_dist checkpoint"
    if tracked is None or tracked < step:
        return f"{TRACKER} does not reach this step: its save did not end"
    return ""


def size_fault(folder: Path, seal: Seal) -> str:
    """Return the first file that is missing or has another size than was sealed; empty if all agree."""
    for name, file in seal.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in a name
            return f"{name!r} cannot be looked at: {error.strerror if isinstance(error, OSError) else error}"
        if size != file.size:
            how = "truncated" if size < file.size else "too long"
            return f"{name} is {how}: {size} of {file.size} bytes"
    return ""


def content_fault(folder: Path, seal: Seal, *, but: str | None = None) -> str:
    """Read every file through; return the first one that is not what was sealed, empty if all are.

    Args:
        folder: A checkpoint.
        seal: Its seal.
        but: How names of files end that are not read.
    """
    if fault := size_fault(folder, seal):
        return fault
    for name, file in seal.files.items():
        if but is not None and name.endswith(but):
            continue
        offset = 0
        try:
            with (folder / name).open("rb", buffering=0) as stream:
                for length, expected in file.pieces:
                    if hash_piece(stream.read(length)) != expected:
                        return f"{name} is damaged between bytes {offset} and {offset + length}"
                    offset += length
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def has_optimizer(found: Found) -> bool:
    """Tell whether a complete checkpoint holds optimizer state.

    Without a seal the names of its tensors say so: they stand as they are in Megatron's pickled metadata.

    Raises:
        OSError: The metadata cannot be read.
    """
    if found.seal is not None:
        return found.seal.optimizer
    return b"optimizer." in (found.folder / TORCH_METADATA).read_bytes()


def newest(found: list[Found]) -> Found | None:
    """Return the complete checkpoint with the highest step."""
    return max((each for each in found if each.complete), key=lambda each: each.step, default=None)


def at_step(directory: Path, step: int) -> Found | None:
    """Return the checkpoint of one step, complete or not; None if nothing has its name."""
    folder = step_folder(directory, step)
    return look_at(folder, step, _tracked_step(directory)) if _is_there(folder) else None


def _is_there(path: Path) -> bool:
    """Tell whether something of that name is there, be it a link that leads nowhere."""
    return path.exists() or path.is_symlink()


def _tracked_step(directory: Path) -> int | None:
    try:
        return int((directory / TRACKER).read_text().strip())
    except (FileNotFoundError, ValueError):
        return None


def _size_of(folder: Path) -> int:
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # A save or a deletion may go on meanwhile.
            with contextlib.suppress(OSError):
                stat = Path(root, name).stat()
                # An interrupted save has made room that it did not come to fill.
                size += 0 if name == SEAL else min(stat.st_size, stat.st_blocks * 512)
    return size


def as_json(found: list[Found]) -> str:
    """Write what was found as JSON, without the hashes."""
    return json.dumps(
        [
            {
                "step": each.step,
                "folder": str(each.folder),
                "complete": each.complete,
                "fault": each.fault,
                "size": each.size,
                "saved_at": each.seal.saved_at if each.seal else None,
                "optimizer": each.seal.optimizer if each.seal else None,
                "world_size": each.seal.world_size if each.seal else None,
                "layout": dict(each.seal.layout) if each.seal else None,
                "engine": each.seal.engine if each.seal else None,
                "chunk_mb": each.seal.chunk_mb if each.seal else None,
                "versions": dict(each.seal.versions) if each.seal else None,
            }
            for each in found
        ],
        indent=1,
    )
