"""Checkpoint folders as a run leaves them, with small files."""

from __future__ import annotations

from pathlib import Path

from muon_offload_cli.checkpoints.keeping import make_room, put_in_place
from muon_offload_cli.checkpoints.names import SAVING, TRACKER, step_folder
from muon_offload_cli.checkpoints.seal import Seal, seal_file

CONTENT = bytes(range(256)) * 40


def write_files(folder: Path, optimizer: bool = True) -> None:
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(CONTENT)
    (folder / ".metadata").write_bytes(b"pickled optimizer.state" if optimizer else b"pickled")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def seal(folder: Path, step: int, **more: object) -> Seal:
    given: dict[str, object] = {
        "step": step,
        "saved_at": "2026-11-29T12:00:00+00:00",
        "optimizer": True,
        "world_size": 4,
        "layout": {"tp": 2, "pp": 1, "cp": 1, "ep": 2, "etp": 2, "dp": 2},
        "padded_vocabulary": 512,
        "engine": "disk",
        "chunk_mb": 0.5,
        "versions": {"torch": "2.14"},
        "files": {path.name: seal_file(path) for path in sorted(folder.iterdir())},
    }
    return Seal(**given | more)  # type: ignore[arg-type]


def save(directory: Path, step: int, **more: object) -> Path:
    make_room(directory)
    growing = step_folder(directory / SAVING, step)
    write_files(growing)
    return put_in_place(directory, seal(growing, step, **more))


def save_plain(directory: Path, step: int, optimizer: bool = True) -> Path:
    """What Megatron leaves without us."""
    folder = step_folder(directory, step)
    write_files(folder, optimizer)
    (directory / TRACKER).write_text(str(step))
    return folder
