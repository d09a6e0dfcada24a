"""A thread that runs jobs one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class OrderedThread:
    """Runs jobs in the order in which they were submitted, on one thread.

    The thread is a daemon: a process that ends without closing its offloader must not hang on a job that
    waits for a staging buffer. (`ThreadPoolExecutor` joins its threads at interpreter exit.)

    Args:
        name: Shown by debuggers.
        on_start: Runs first, on the thread.
        on_error: Gets the first exception of a job; the thread ends then.
    """

    def __init__(
        self, name: str, on_start: Callable[[], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(on_start, on_error), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Append a job."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread after the jobs submitted so far and wait for it."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self, on_start: Callable[[], None], on_error: Callable[[BaseException], None]) -> None:
        try:
            on_start()
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: its owner raises the error
            on_error(error)
