"""The life of a step: chunk i+1 is fetched, chunk i is stepped, chunk i-1 is written back.

The order alternates from step to step, so that each step begins with the chunks that the windows still hold
from the one before; these are neither fetched nor written back in between.

The training thread owns the order. Two threads copy, one toward the device and one away from it; they take
work in that same order. A fault in any thread fails the pipeline: the training thread meets the original
error at its next wait, and every other thread is woken.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from muon_offload_cli.offload import lane as lanes
from muon_offload_cli.offload.mover import Emptied, Mover
from muon_offload_cli.offload.ordered_thread import OrderedThread
from muon_offload_cli.offload.plan import Chunk, Tier
from muon_offload_cli.offload.stall_clock import StallClock
from muon_offload_cli.offload.window import Window
from muon_offload_cli.storage.extent import Extent


@dataclass(kw_only=True, slots=True)
class _Visit:
    """One passage of a chunk through its window."""

    chunk: Chunk
    window: Window
    turn: int
    arrived: Future[torch.cuda.Event | None]


class Pipeline:
    """Moves the streamed chunks of one rank through the windows.

    Args:
        chunks: Streamed chunks in plan order (tiers host and disk).
        extents: Place of each chunk in its tier's store, by chunk index.
        movers: One mover a tier.
        windows: Device memory; the i-th of `chunks` uses window ``i % len(windows)``.
        device: Where the windows are.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        extents: Mapping[int, Extent],
        movers: Mapping[Tier, Mover],
        windows: Sequence[Window],
        device: torch.device,
    ) -> None:
        self._chunks = list(chunks)
        self._extents = extents
        self._movers = movers
        self._windows = windows
        self._device = device
        self._position = {chunk.index: position for position, chunk in enumerate(self._chunks)}
        self._written: dict[int, Future[None]] = {}
        # Chunks whose current bytes are in their window alone, with the mark of their last step.
        self._kept: dict[int, tuple[Window, torch.cuda.Event | None]] = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        enter = lanes.Lane(device).enter_thread
        self._upload = OrderedThread("muon-upload", enter, self._fail)
        self._download = OrderedThread("muon-download", enter, self._fail)
        self._upcoming: deque[_Visit] = deque()
        self._sweeps = 0
        self.stall = StallClock(device)
        # A daemon thread that is inside torch when the interpreter ends aborts the process.
        atexit.register(self._stop)

    def sweep(self, *, load: bool = True) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Visit every chunk once, in alternating order, and write each one back that its window cannot keep.

        Args:
            load: Fetch the chunk's bytes before the visit; False for chunks that are written anew. Those are
                all written back, so that who loads a checkpoint next need not wait for it; the first time
                their masters alone, since the tiers hold zeros.

        Yields:
            The chunk and its window, a ``uint8`` tensor on the device that holds its image. What the caller
            enqueued on the current stream before asking for the next chunk is part of the visit.

        Raises:
            StoreError: A read or a write failed; the original error of the thread.
            RuntimeError: An earlier sweep was left before its end, so that no chunk can follow.
        """
        if not self._upcoming:
            self._request_all(load=load)
        born = not load and self._sweeps == 1
        for _ in range(len(self._upcoming)):
            visit = self._upcoming.popleft()
            self.stall.begin()
            lanes.compute_waits_for(self._wait(visit.arrived), self._device)
            self.stall.end()
            self._kept.pop(visit.chunk.index, None)
            try:
                yield visit.chunk, visit.window.memory[: visit.chunk.nbytes]
            except BaseException:
                # Its window would never be handed over: whoever sweeps again must hear of it, not hang.
                self._fail(RuntimeError(f"a sweep was left at chunk {visit.chunk.index}, before its end"))
                raise
            nbytes = visit.chunk.born_bytes if born else visit.chunk.nbytes
            self._leave(visit, lanes.mark_compute(self._device), nbytes, keep=load)

    def prefetch(self) -> None:
        """Begin fetching for the next sweep, unless that has begun already."""
        if not self._upcoming:
            self._request_all(load=True)

    def forget(self) -> None:
        """Drop what was fetched and what the windows hold: the tiers were written from outside.

        Call `synchronize` before the tiers are written.
        """
        while self._upcoming:
            visit = self._upcoming.popleft()
            lanes.wait(self._wait(visit.arrived))
            visit.window.empty_up_to(visit.turn, visit.window.memory.numel(), None)
        for window in self._windows:
            window.holds = None

    def synchronize(self) -> None:
        """Block until all write-back is done; afterwards every tier holds the current bytes."""
        self.check()
        for index, (window, after) in self._kept.items():
            chunk = self._chunks[self._position[index]]
            self._write_back(chunk, window, after, chunk.nbytes, lambda *_: None)
        self._kept.clear()
        for future in list(self._written.values()):
            self._wait(future)

    def check(self) -> None:
        """Raise the error of a failed thread, if there is one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop all threads; work in flight is abandoned if the pipeline failed.

        Raises:
            StoreError: The write-back that was still under way failed; everything is stopped all the same.
        """
        try:
            if self._error is None:
                self.synchronize()
        finally:
            self._stop()

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        self._fail(RuntimeError("the offloader is closed"))
        self._upload.stop()
        self._download.stop()
        for mover in self._movers.values():
            mover.close()

    def _request_all(self, *, load: bool) -> None:
        """Request every chunk of the next sweep, forward and backward in turn.

        What the windows still hold is used first and not fetched again. The copying threads take each
        request as soon as its window and a staging buffer are free.
        """
        self.check()
        order = self._chunks if self._sweeps % 2 == 0 else self._chunks[::-1]
        self._sweeps += 1
        self._upcoming.extend(self._request(chunk, load=load) for chunk in order)

    def _request(self, chunk: Chunk, *, load: bool) -> _Visit:
        window = self._windows[self._position[chunk.index] % len(self._windows)]
        turn = window.next_turn()
        visit = _Visit(chunk=chunk, window=window, turn=turn, arrived=Future())
        mover = self._movers[chunk.tier]
        extent = self._extents[chunk.index]
        fetched = load and window.holds != chunk.index
        window.holds = chunk.index
        earlier = self._written.get(chunk.index)
        if fetched:
            mover.prefetch(extent, earlier)

        def arrive() -> None:
            if fetched:
                if earlier is not None:
                    earlier.result()
                visit.arrived.set_result(mover.load(extent, window, turn))
            else:
                # Nothing to fetch, but the window may still be copied out for the turn before.
                visit.arrived.set_result(window.wait_empty(turn, window.memory.numel()))
            window.forget_before(turn)

        self._upload.submit(arrive)
        return visit

    def _leave(self, visit: _Visit, after: torch.cuda.Event | None, nbytes: int, *, keep: bool) -> None:
        """Keep a stepped chunk in its window if the next sweep begins with it there, else write it back."""
        window, turn = visit.window, visit.turn
        if keep and window.holds == visit.chunk.index:
            self._kept[visit.chunk.index] = window, after
            # In order: the end of a larger chunk that was here before may still be on its way out.
            self._download.submit(lambda: window.empty_up_to(turn, window.memory.numel(), after))
            return

        def emptied(done: int, mark: torch.cuda.Event | None) -> None:
            window.empty_up_to(turn, window.memory.numel() if done == nbytes else done, mark)

        self._write_back(visit.chunk, window, after, nbytes, emptied)

    def _write_back(
        self, chunk: Chunk, window: Window, after: torch.cuda.Event | None, nbytes: int, emptied: Emptied
    ) -> None:
        mover = self._movers[chunk.tier]
        done: Future[None] = Future()
        earlier = self._written.get(chunk.index)

        def store() -> None:
            if earlier is not None:
                # A chunk that is written anew, not fetched, may still be on its way to disk from the sweep
                # before; two writes of one extent have no order of their own.
                earlier.result()
            extent = Extent(self._extents[chunk.index].offset, nbytes)
            stored = mover.save(extent, window.memory, after, emptied)
            stored.add_done_callback(lambda future: self._finish(done, future))

        with self._lock:
            if self._error is None:
                self._written[chunk.index] = done
        self.check()
        self._download.submit(store)

    def _finish(self, done: Future[None], stored: Future[None]) -> None:
        error = stored.exception()
        if error is not None:
            self._fail(error)
        with self._lock:
            if not done.done():
                done.set_result(None)

    def _wait[T](self, future: Future[T] | None) -> T | None:
        """Wait for a future of this pipeline; raise the pipeline's error if it failed."""
        if future is None:
            return None
        while not future.done():
            self.check()
            try:
                future.exception(timeout=0.2)
            except TimeoutError:
                continue
        self.check()
        return future.result()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            for future in self._written.values():
                if not future.done():
                    future.set_exception(RuntimeError("the pipeline failed"))
        self._wake()

    def _wake(self) -> None:
        for window in self._windows:
            window.fail()
        for mover in self._movers.values():
            mover.abort()
