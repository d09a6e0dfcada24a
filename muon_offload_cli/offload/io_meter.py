"""Counting what goes to and from the drive, and for how long any of it was under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class IoMeter:
    """Bytes moved, and the seconds in which at least one request was under way. Thread-safe.

    Attributes:
        bytes_read: Bytes that arrived.
        bytes_written: Bytes that were stored.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self._busy_s = 0.0
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def request(self, *, read: int = 0, written: int = 0) -> Iterator[None]:
        """Enclose one request; its bytes count only if it ends well."""
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
        try:
            yield
            with self._lock:
                self.bytes_read += read
                self.bytes_written += written
        finally:
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self._busy_s += time.perf_counter() - self._since

    @property
    def busy_s(self) -> float:
        """Length of the union of all requests' times up to now."""
        with self._lock:
            under_way = time.perf_counter() - self._since if self._under_way else 0.0
            return self._busy_s + under_way
