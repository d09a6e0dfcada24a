"""Reading a file that another process appends to, a whole line at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LAST_BYTES = 64 * 1024
"""Of a log, read for the cause of a death."""


@dataclass(kw_only=True, slots=True)
class Tail:
    """Follows one file by path; nothing is kept open between calls.

    Attributes:
        path: The file, which need not exist yet.
    """

    path: Path
    _offset: int = 0
    _rest: bytes = b""

    def new_lines(self) -> list[str]:
        """Return the lines completed since the last call, without their newlines.

        A line that has no newline yet is kept for the next call; a file that became shorter is read
        from its start.
        """
        try:
            with self.path.open("rb") as stream:
                if stream.seek(0, 2) < self._offset:
                    self._offset, self._rest = 0, b""
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def last_lines(path: Path) -> str:
    """Return the end of a text file, empty if there is no such file."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - LAST_BYTES))
            return stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
