"""Copies between host memory and the training device, in order, on a stream of their own."""

from __future__ import annotations

import logging

import torch

_logger = logging.getLogger(__name__)


class Lane:
    """One direction of copies: a CUDA stream, or plain memory copies on a CPU device.

    A lane belongs to the thread that copies on it. Marks are CUDA events; on a CPU device work has ended
    when the call returns, so a mark is None.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Select the device in the calling thread: torch keeps the current device per thread."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy bytes once `after` has happened; return a mark for the end of this copy."""
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return _record(self._stream)

    def finish(self) -> None:
        """Block until every copy on this lane has ended, so that its memory may be given back."""
        if self._stream is not None:
            try:
                self._stream.synchronize()
            except RuntimeError:
                # The context died of an earlier error, which is being raised elsewhere; nothing copies now.
                _logger.warning("waiting for copies failed", exc_info=True)


def mark_compute(device: torch.device) -> torch.cuda.Event | None:
    """Return a mark for all work enqueued so far on the calling thread's current stream."""
    return _record(torch.cuda.current_stream(device)) if device.type == "cuda" else None


def compute_waits_for(mark: torch.cuda.Event | None, device: torch.device) -> None:
    """Let later work on the current stream wait for `mark`, without blocking the thread."""
    if mark is not None:
        torch.cuda.current_stream(device).wait_event(mark)


def wait(mark: torch.cuda.Event | None) -> None:
    """Block the calling thread until `mark` has happened; other threads go on."""
    if mark is not None:
        mark.synchronize()


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: a thread that waits for it sleeps; by default it would keep a core busy.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
