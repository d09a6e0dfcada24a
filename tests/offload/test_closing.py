"""Closing an offloader, from any thread and in any state, leaves no thread, no byte and no hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from muon_offload_cli.errors import UserError
from muon_offload_cli.storage.extent import Extent
from tests.fakes.fake_torchrun import HANG_S, wait_until
from tests.fakes.stores import SlowStore, WrappedStore
from tests.offload.rig import (
    PARAMETERS,
    closed_in_time,
    fill,
    make,
    opening,
    our_threads,
    sweep,
    train,
)

REPOSITORY = Path(__file__).parents[2]


def test_a_closed_offloader_refuses_sweeps_and_closes_twice(directory: Path) -> None:
    offloader = make(directory)
    fill(offloader)
    offloader.close()
    offloader.close()
    with pytest.raises(RuntimeError, match="the offloader is closed"):
        sweep(offloader, 0)


@pytest.mark.parametrize("sweeps", [0, 1, 2])
@pytest.mark.parametrize("engine", ["host", "mapped", "disk"])
def test_closing_with_reads_in_flight_returns(directory: Path, engine: str, sweeps: int) -> None:
    slow = opening(lambda store: SlowStore(store, 0.05)) if engine == "disk" else None
    offloader = make(directory, engine, open_store=slow, windows=4, io_threads=1)
    with closed_in_time(offloader):
        train(offloader, sweeps)
        offloader.prefetch()


@pytest.mark.parametrize(("engine", "thread"), [("disk", "muon-write"), ("mapped", "muon-download")])
def test_an_owner_that_is_collected_on_a_thread_of_the_offloader_closes_it(
    directory: Path, engine: str, thread: str
) -> None:
    is_dropped, owner = threading.Event(), ["the optimizer"]

    class Collecting(WrappedStore):
        """Closes the offloader where Python may collect garbage as well as anywhere."""

        def _write(self, extent: Extent, source: memoryview) -> None:
            self._collect()
            super()._write(extent, source)

        def _view(self, extent: Extent) -> memoryview:
            self._collect()
            return super()._view(extent)

        def _collect(self) -> None:
            if owner and threading.current_thread().name.startswith(thread):
                is_dropped.wait()
                owner.clear()
                offloader.close()

    # Room for all, so that birth waits for no write.
    room = {"windows": len(PARAMETERS), "io_threads": 1, "staging_bytes": 1 << 20}
    offloader = make(directory, engine, open_store=opening(Collecting), **room)
    fill(offloader)
    is_dropped.set()
    assert wait_until(lambda: our_threads() == [])


def test_closing_before_anything_was_filled_leaves_nothing(directory: Path) -> None:
    for engine in ("host", "mapped", "disk"):
        make(directory, engine).close()


def test_a_directory_that_cannot_be_used_leaves_nothing(directory: Path) -> None:
    directory.parent.joinpath("file").touch()
    threads = threading.active_count()
    with pytest.raises(UserError):
        make(directory.parent / "file")
    with pytest.raises(UserError):
        # The host tier was already taken when the disk tier fails.
        make(directory.parent / "file", host_bytes=20_000)
    assert threading.active_count() == threads


LEAVES_WITHOUT_CLOSING = """
import sys
from pathlib import Path
from tests.fakes.stores import SlowStore
from tests.offload.rig import make, opening, train
slow = opening(lambda store: SlowStore(store, 0.02)) if sys.argv[2] == "disk" else None
offloader = make(Path(sys.argv[1]), sys.argv[2], open_store=slow, windows=3, io_threads=1)
train(offloader, 1)
offloader.prefetch()
if sys.argv[3] == "raise":
    for state in offloader.sweep():
        raise KeyError("first cause")
"""


@pytest.mark.parametrize("ending", ["return", "raise"])
@pytest.mark.parametrize("engine", ["host", "mapped", "disk"])
def test_a_process_that_ends_without_closing_ends(
    tmp_path: Path, directory: Path, engine: str, ending: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_WITHOUT_CLOSING, str(directory), engine, ending],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == (1 if ending == "raise" else 0), done.stderr
    assert ("first cause" in done.stderr) == (ending == "raise")
    if engine != "host":
        # The file had no name; the folder, which nobody could remove any more, is empty.
        assert list(directory.iterdir()) == []
        directory.rmdir()
