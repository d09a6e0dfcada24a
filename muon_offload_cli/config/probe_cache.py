"""What the probe of Megatron said last time, kept by what it was asked of.

The answer is a matter of the installed files alone, so its key is a hash over the interpreter, and path, size
and modification time of every file that it comes from, in the order of the search path. A cache that is
damaged, belongs to another user or can be written by one is not read. Failing answers are not kept: what
repairs them may not touch any of these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Packages below each folder of the search path whose sources decide what the probe says.
_SOURCES = ("megatron/core", "megatron/training", "emerging_optimizers")
_FILES = ("megatron/__init__.py", "torch/__init__.py", "torch/version.py", "transformer_engine/__init__.py")
_PROBE = [
    Path(__file__).resolve().parents[1] / "megatron" / name
    for name in ("probe.py", "native_contract.py", "release.py")
]
_KEPT = 4
_MAX_BYTES = 4 * 1024**2


def cache_file(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return where answers are kept; None for a user without a home."""
    variables = os.environ if environment is None else environment
    base = variables.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "muon-offload" / "probe.json"
    home = variables.get("HOME", "")
    return Path(home) / ".cache" / "muon-offload" / "probe.json" if Path(home).is_absolute() else None


def fingerprint(search_path: Sequence[str]) -> str:
    """Return the key of what a probe with this search path would look at.

    Folders that hold none of it do not count, or every working folder would have an answer of its own.
    """
    digest = hashlib.sha256(f"{sys.executable}\0{sys.version}\0".encode())
    for line in filter(None, _states(search_path)):
        digest.update(line.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def load(path: Path | None, key: str) -> dict[str, Any] | None:
    """Return the answer that was kept under `key`, None if there is none that can be trusted."""
    answer = _entries(path).get(key)
    return answer if isinstance(answer, dict) else None


def store(path: Path | None, key: str, answer: Mapping[str, Any]) -> None:
    """Keep an answer; where that is not possible, the next run asks again."""
    if path is None:
        return
    entries = {name: value for name, value in _entries(path).items() if name != key}
    newest = dict(list(entries.items())[-(_KEPT - 1) :]) | {key: dict(answer)}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            temporary.write_text(json.dumps(newest))
            temporary.chmod(0o600)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _entries(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            foreign = facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if foreign or not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_BYTES:
                return {}
            entries = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _states(search_path: Sequence[str]) -> Iterator[str]:
    yield from map(_state, _PROBE)
    for entry in search_path:
        root = Path(entry or ".").absolute()
        for name in _FILES:
            yield _state(root / name)
        for name in _SOURCES:
            yield from _tree(str(root / name))


def _tree(folder: str) -> Iterator[str]:
    """Yield the state of every Python file below a folder, in an order of its own names."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                yield from _tree(entry.path)
        elif entry.name.endswith(".py"):
            yield _state(Path(entry.path))


def _state(path: Path) -> str:
    try:
        facts = path.stat()
    except OSError:
        return ""
    return f"{path}:{facts.st_size}:{facts.st_mtime_ns}"
