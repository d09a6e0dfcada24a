"""The seal: a small JSON file that is written last and says what a checkpoint holds, hashes included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Self

import xxhash

from muon_offload_cli.checkpoints.names import SEAL, replace_text
from muon_offload_cli.units import PIECE_BYTES

FORMAT = 2
"""Since 2 the seal has a sum of itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSeal:
    """One file of a checkpoint.

    Attributes:
        size: Bytes.
        pieces: Length in bytes and XXH3 sum (64 bits, hexadecimal) of each piece, in order, over the whole
            file. Pieces end where a tensor ends, so that a reader of one tensor can check just that.
    """

    size: int
    pieces: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """What a checkpoint holds and where it came from.

    Attributes:
        step: Optimizer steps taken.
        saved_at: Local time with zone, ISO 8601.
        optimizer: Whether optimizer state is in it.
        world_size: Ranks that wrote it.
        layout: Parallel sizes by name (tp, pp, cp, ep, etp, dp).
        padded_vocabulary: Rows of the embedding, padding included; a run that goes on must have as many.
        engine: Where Muon's state lay.
        chunk_mb: Chunk size of that run.
        versions: Of muon-offload, torch and Megatron.
        model: What decides names and shapes of its tensors, by configuration key; empty in older seals.
        files: By name within the folder.
        format: Version of this description.
    """

    step: int
    saved_at: str
    optimizer: bool
    world_size: int
    layout: Mapping[str, int]
    padded_vocabulary: int
    engine: str
    chunk_mb: float
    versions: Mapping[str, str]
    model: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileSeal] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the seal itself."""
        return sum(file.size for file in self.files.values())

    def write(self, folder: Path) -> None:
        """Seal a checkpoint whose files are on the drive; raises OSError."""
        data = asdict(self)
        replace_text(folder / SEAL, _compact(data | {"sum": _sum_of(data)}))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the seal of a checkpoint; None if there is none.

        Raises:
            OSError: It cannot be read.
            ValueError: It is no seal, or one of a later format.
        """
        try:
            text = (folder / SEAL).read_bytes()
        except FileNotFoundError:
            return None
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError("it is not whole: its text is no JSON") from error
        version = data.get("format") if isinstance(data, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise ValueError(f"it has format {version}, this version reads up to {FORMAT}")
        if not _is_seal(data):
            raise ValueError("it is not whole: it does not say all that a seal says")
        told = data.pop("sum", None)
        if told != _sum_of(data) and (told is not None or data["format"] > 1):
            raise ValueError("it is damaged: its sum is another")
        data["files"] = {
            name: FileSeal(size=file["size"], pieces=tuple((length, sum_) for length, sum_ in file["pieces"]))
            for name, file in data["files"].items()
        }
        return cls(**{each.name: data[each.name] for each in fields(cls) if each.name in data})


_KINDS: Mapping[str, type | UnionType] = {
    "step": int,
    "saved_at": str,
    "optimizer": bool,
    "world_size": int,
    "layout": dict,
    "padded_vocabulary": int,
    "engine": str,
    "chunk_mb": int | float,
    "versions": dict,
    "files": dict,
    "format": int,
}


def _is_seal(data: object) -> bool:
    """Tell whether parsed JSON has every value of a seal, each of its kind."""
    return (
        isinstance(data, dict)
        and all(isinstance(data.get(name), kind) for name, kind in _KINDS.items())
        and isinstance(data.get("model", {}), dict)
        and all(isinstance(size, int) for size in data["layout"].values())
        and all(_is_file_seal(file) for file in data["files"].values())
    )


def _compact(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def _sum_of(data: Mapping[str, Any]) -> str:
    return hash_piece(_compact(data).encode())


def _is_file_seal(file: object) -> bool:
    return (
        isinstance(file, dict)
        and isinstance(file.get("size"), int)
        and isinstance(file.get("pieces"), list)
        and all(
            isinstance(piece, list) and [type(part) for part in piece] == [int, str]
            for piece in file["pieces"]
        )
    )


def hash_piece(data: bytes | memoryview) -> str:
    """Return the sum of one piece."""
    return xxhash.xxh3_64_hexdigest(data)


def seal_file(path: Path) -> FileSeal:
    """Read a file through and describe it; raises OSError."""
    pieces = []
    with path.open("rb", buffering=0) as stream:
        while data := stream.read(PIECE_BYTES):
            pieces.append((len(data), hash_piece(data)))
    return FileSeal(size=sum(length for length, _ in pieces), pieces=tuple(pieces))
