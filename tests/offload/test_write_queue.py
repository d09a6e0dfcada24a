"""The order in which staged pieces go to disk."""

from __future__ import annotations

import threading

import pytest
import torch

from muon_offload_cli.offload.mover import StagedMover
from muon_offload_cli.offload.write_queue import WriteQueue
from muon_offload_cli.storage.checksums import Checksums, Verify
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.memory import MemoryStore
from muon_offload_cli.storage.ring import Slot, StagingRing
from muon_offload_cli.storage.store import Store
from tests.fakes.stores import WrappedStore
from tests.offload.rig import CPU

PIECE = 4096
CHUNKS = [Extent(number * 2 * PIECE, 2 * PIECE) for number in range(3)]
SLOT = Slot(0, memoryview(bytearray(PIECE)))


@pytest.fixture
def queue() -> WriteQueue:
    """Three chunks of two pieces each, handed over in order."""
    made = WriteQueue()
    for chunk in CHUNKS:
        for start in (0, PIECE):
            made.put(chunk.offset, Extent(chunk.offset + start, PIECE), SLOT)
    return made


def take(queue: WriteQueue, count: int) -> list[int]:
    return [queue.take()[0].offset // PIECE for _ in range(count)]


def test_the_oldest_piece_is_written_first(queue: WriteQueue) -> None:
    assert take(queue, 6) == [0, 1, 2, 3, 4, 5]


def test_chunks_that_will_be_read_again_are_written_in_the_order_of_reading(queue: WriteQueue) -> None:
    for chunk in (CHUNKS[2], CHUNKS[1]):
        queue.await_chunk(chunk.offset)
    assert take(queue, 6) == [4, 5, 2, 3, 0, 1]


def test_the_first_chunk_of_the_file_is_awaited_like_any_other(queue: WriteQueue) -> None:
    take(queue, 2)
    queue.put(CHUNKS[0].offset, CHUNKS[0], SLOT)
    queue.await_chunk(CHUNKS[0].offset)
    assert take(queue, 5) == [0, 2, 3, 4, 5]


def test_a_chunk_that_was_read_waits_its_turn_when_it_comes_back(queue: WriteQueue) -> None:
    queue.await_chunk(CHUNKS[2].offset)
    assert take(queue, 2) == [4, 5]
    queue.first_is_written()
    queue.put(CHUNKS[2].offset, CHUNKS[2], SLOT)
    assert take(queue, 5) == [0, 1, 2, 3, 4]


def test_the_taker_ends_the_future_of_the_piece(queue: WriteQueue) -> None:
    done = queue.put(CHUNKS[0].offset, CHUNKS[0], SLOT)
    takers = [queue.take()[2] for _ in range(7)]
    assert takers[2] is done


class GatedStore(WrappedStore):
    """Writes once it is let."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.open = threading.Event()

    def _write(self, extent: Extent, source: memoryview) -> None:
        self.open.wait()
        super()._write(extent, source)


@pytest.mark.parametrize("born_bytes", [2 * PIECE, PIECE])
def test_a_chunk_that_is_asked_for_is_written_before_older_ones(born_bytes: int) -> None:
    with GatedStore(MemoryStore(CHUNKS[-1].end, pin=False)) as store:
        mover = StagedMover(
            store,
            CPU,
            read_ring=StagingRing(6, PIECE, pin=False),
            write_ring=StagingRing(6, PIECE, pin=False),
            threads=1,
            checksums=Checksums(Verify.OFF, str),
        )
        window = torch.zeros(2 * PIECE, dtype=torch.uint8)
        born = [Extent(chunk.offset, born_bytes) for chunk in CHUNKS]
        written = [mover.save(part, window, None, lambda *_: None) for part in born]
        mover.prefetch(CHUNKS[2], written[2])
        store.open.set()
        for future in written:
            future.result(60)
        mover.close()
    # The only writer may have taken the very first piece before anything was asked for.
    order = [piece.offset // PIECE for piece in store.writes if piece.offset]
    assert order == ([4, 5, 1, 2, 3] if born_bytes > PIECE else [4, 2])
