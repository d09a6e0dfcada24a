"""Putting a finished checkpoint in its place, and deleting older ones. Rank 0 alone does this."""

from __future__ import annotations

import shutil
from pathlib import Path

from muon_offload_cli.checkpoints.listing import list_checkpoints
from muon_offload_cli.checkpoints.names import SAVING, TRACKER, replace_text, step_folder, sync_folder
from muon_offload_cli.checkpoints.seal import Seal


def make_room(directory: Path) -> Path:
    """Return an empty folder for the next checkpoint to grow in; what an interrupted save left is removed.

    Raises:
        OSError: It cannot be made.
    """
    growing = directory / SAVING
    if growing.exists():
        shutil.rmtree(growing)
    growing.mkdir(parents=True)
    return growing


def put_in_place(directory: Path, seal: Seal) -> Path:
    """Move a finished checkpoint to its name, seal it, and let Megatron's tracker say so.

    A checkpoint of the same step that stands there is replaced. Wherever this is interrupted, no folder
    counts as complete that is not.

    Raises:
        OSError: As the file system reports it.
    """
    growing = directory / SAVING
    final = step_folder(directory, seal.step)
    if final.exists() or final.is_symlink():
        final.rename(growing / f"replaced_{seal.step}")
    step_folder(growing, seal.step).rename(final)
    sync_folder(directory)
    seal.write(final)
    replace_text(directory / TRACKER, str(seal.step))
    shutil.rmtree(growing)
    return final


def delete_older(directory: Path, step: int, keep: int) -> list[Path]:
    """Delete sealed checkpoints of earlier steps, so that `keep` remain with the one of `step`.

    Nothing else is touched: not later steps, not what plain Megatron wrote, not incomplete ones, no links.

    Returns:
        Folders that are gone.
    """
    older = [
        each.folder
        for each in list_checkpoints(directory)
        if each.complete and each.seal is not None and each.step < step and not each.folder.is_symlink()
    ]
    surplus = older[: max(0, len(older) - (keep - 1))]
    for folder in surplus:
        # Out of its name first: half of a checkpoint must not stand where a whole one is looked for.
        grave = directory / SAVING / f"deleted_{folder.name}"
        grave.parent.mkdir(exist_ok=True)
        folder.rename(grave)
    if surplus:
        shutil.rmtree(directory / SAVING)
    return surplus
