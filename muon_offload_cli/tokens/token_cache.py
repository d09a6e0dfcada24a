"""A folder of finished byte datasets, safe to share between ranks, runs and nodes.

An entry is a folder ``<name>/`` with ``tokens.bin``, ``tokens.idx`` and ``record.json``. It comes into
being in one rename, so that a reader sees all of it or nothing, and is trusted only while the sizes and
hashes in its record hold. Writers of one entry exclude each other with a lock file that stays behind.
Everything read back is JSON or raw integers; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muon_offload_cli.config.locations import default_cache_directory, from_home
from muon_offload_cli.config.schema import DataConfig
from muon_offload_cli.errors import UserError, does_not_fit, override, wrong
from muon_offload_cli.units import format_bytes

PREFIX_NAME = "tokens"
_FILES = (f"{PREFIX_NAME}.bin", f"{PREFIX_NAME}.idx")
_RECORD = "record.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Figures of a byte dataset: tokens, and their unigram entropy in nats a token."""

    num_tokens: int
    unigram_entropy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A dataset that lies in the cache, checked: Megatron's path prefix and its figures."""

    prefix: Path
    statistics: Statistics


def cache_root(data: DataConfig) -> Path:
    """Return the cache folder: ``data.cache_directory``, or that of `default_cache_directory`.

    Raises:
        UserError: ``data.cache_directory`` is relative, or the user has no home.
    """
    if data.cache_directory is not None:
        root = from_home(data.cache_directory)
        if not root.is_absolute():
            raise wrong(
                f"data.cache_directory={data.cache_directory} is not an absolute path.",
                override("data.cache_directory", root.absolute()),
                "data.cache_directory",
            )
        return root
    return default_cache_directory()


def fetch(root: Path, name: str, expected_bytes: int, write: Callable[[Path], Statistics]) -> Entry:
    """Return the entry `name`, written first if it is missing or damaged.

    Args:
        root: Cache folder; created if missing, readable by its owner alone.
        name: Folder name; two datasets of one name must hold the same tokens.
        expected_bytes: About what the entry will take, for the message of a full disk.
        write: Writes the pair at a path prefix and returns its figures. Called with the lock held.

    Raises:
        UserError: The cache cannot be written or is full. Nothing half-written stays.
    """
    # Without the lock first: a valid entry also serves from a read-only or lock-less file system.
    entry = _read(root / name)
    if entry is not None:
        return entry
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            return _read(root / name) or _write(root, name, write)
    except OSError as error:
        raise _cache_error(root, expected_bytes, error) from error


def _read(folder: Path) -> Entry | None:
    """Return the entry if its record can be read and its files are those of the record."""
    try:
        record = json.loads((folder / _RECORD).read_bytes())
        if not isinstance(record, dict) or record.get("files") != _describe(folder):
            return None
    except (OSError, ValueError, RecursionError):
        return None
    num_tokens, entropy = record.get("num_tokens"), record.get("unigram_entropy")
    if not isinstance(num_tokens, int) or not isinstance(entropy, float):
        return None
    return Entry(
        prefix=folder / PREFIX_NAME, statistics=Statistics(num_tokens=num_tokens, unigram_entropy=entropy)
    )


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file; about a second a GiB, which starting Megatron exceeds."""
    files = {}
    for name in _FILES:
        with (folder / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            files[name] = {"bytes": os.fstat(stream.fileno()).st_size, "sha256": digest}
    return files


def _write(root: Path, name: str, write: Callable[[Path], Statistics]) -> Entry:
    temporary = root / f"{name}.tmp"
    # The lock is held, so what lies here is from a run that was killed.
    _remove(temporary)
    try:
        temporary.mkdir(mode=0o700)
        statistics = write(temporary / PREFIX_NAME)
        record = {**asdict(statistics), "files": _describe(temporary)}
        (temporary / _RECORD).write_text(json.dumps(record, indent=1))
        _remove(root / name)
        temporary.rename(root / name)
    finally:
        with contextlib.suppress(OSError):
            _remove(temporary)
    return Entry(prefix=root / name / PREFIX_NAME, statistics=statistics)


def _remove(path: Path) -> None:
    """Remove a folder, or a file or link in its place; nothing is done if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel lets go of the lock when its holder dies, however it dies. The file is never removed:
    # a waiter would hold a lock on a name that no longer exists.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cache_error(root: Path, expected_bytes: int, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return does_not_fit(
            f"data.cache_directory={root} is full: the tokens need about {format_bytes(expected_bytes)}.",
            f"free {format_bytes(expected_bytes)}, or data.cache_directory=/path/with/room",
            "data.cache_directory",
        )
    return does_not_fit(
        f"data.cache_directory={root} cannot be written: {error.strerror or error}.",
        "data.cache_directory=/path/you/can/write",
        "data.cache_directory",
    )
