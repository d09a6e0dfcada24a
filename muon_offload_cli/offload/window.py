"""Windows: the places on the device where chunks are stepped."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from muon_offload_cli.offload.plan import Chunk, window_sizes


class Window:
    """Device memory for one chunk at a time, handed over to the next chunk as it empties.

    The thread that copies a chunk out says how far it has come; the thread that copies the next one in
    waits for just the bytes it is about to overwrite. So no slot waits for the largest chunk.

    Attributes:
        memory: ``uint8`` tensor on the device, as large as the largest chunk that uses this window.
        holds: Index of the chunk whose current bytes are here, None if there is none. Main thread only.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.holds: int | None = None
        self._changed = threading.Condition()
        self._turn = 0
        self._emptied: dict[int, list[tuple[int, torch.cuda.Event | None]]] = {-1: [(nbytes, None)]}
        self._failed = False

    def next_turn(self) -> int:
        """Hand out the right to use the window; turns are served in this order."""
        with self._changed:
            turn = self._turn
            self._turn += 1
            self._emptied[turn] = []
        return turn

    def empty_up_to(self, turn: int, nbytes: int, mark: torch.cuda.Event | None) -> None:
        """Say that the first `nbytes` of the chunk of `turn` have been copied out once `mark` happened."""
        with self._changed:
            self._emptied[turn].append((nbytes, mark))
            self._changed.notify_all()

    def wait_empty(self, turn: int, end: int) -> torch.cuda.Event | None:
        """Block until bytes before `end` were left by the turn before `turn`; return the mark to wait for.

        Raises:
            RuntimeError: The pipeline failed while waiting.
        """
        with self._changed:
            while True:
                if self._failed:
                    raise RuntimeError("the pipeline failed")
                for nbytes, mark in self._emptied[turn - 1]:
                    if nbytes >= end:
                        return mark
                self._changed.wait()

    def forget_before(self, turn: int) -> None:
        """Drop what was recorded of the turns that nobody waits for any more."""
        with self._changed:
            for old in [key for key in self._emptied if key < turn - 1]:
                del self._emptied[old]

    def fail(self) -> None:
        """Wake every waiting thread with an error."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


def make_windows(chunks: Sequence[Chunk], count: int, device: torch.device) -> list[Window]:
    """Allocate up to `count` windows for streamed chunks; chunk number i of them uses window ``i % count``.

    Each window is as large as the largest chunk that uses it, so that one large parameter does not cost its
    size `count` times.
    """
    return [Window(nbytes, device) for nbytes in window_sizes(chunks, count)]
