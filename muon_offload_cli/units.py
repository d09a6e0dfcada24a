"""Sizes in the user's units and in bytes."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

PIECE_BYTES = 8 * MIB
"""Size of one disk request, and the most of a checkpoint's piece: the knee measured in docs/lab-log.md."""


def format_bytes(num_bytes: float) -> str:
    """Write a byte count with two decimals in the largest fitting binary unit, ``3.38 GiB``."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def counted(number: int, noun: str) -> str:
    """Write a number of things, ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"
