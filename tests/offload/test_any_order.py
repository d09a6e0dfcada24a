"""Any order of calls: a Hypothesis state machine beside the in-memory model."""

from __future__ import annotations

import copy
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.piece_writer import PieceWriter, Sources
from muon_offload_cli.storage.store import Store, StoreError
from tests.fakes.stores import WrappedStore
from tests.offload.rig import (
    PARAMETERS,
    Model,
    closed_in_time,
    differences,
    fill,
    make,
    opening,
    our_threads,
    sweep,
)


class Breakable(WrappedStore):
    """Works until it is told to fail."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.broken = ""

    def _read(self, extent: Extent, target: memoryview) -> None:
        self._fail_if("read")
        super()._read(extent, target)

    def _write(self, extent: Extent, source: memoryview) -> None:
        self._fail_if("write")
        super()._write(extent, source)

    def _fail_if(self, operation: str) -> None:
        if self.broken == operation:
            raise StoreError("broken", path=self.path, operation=operation, errno=errno.EIO)


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        engine=st.sampled_from(["disk", "disk", "disk", "mapped", "host"]),
        windows=st.integers(1, 6),
        chunk_bytes=st.sampled_from([0, 1, 6_000, 12_000, 50_000]),
        fraction=st.sampled_from([1.0, 0.8]),
        host_bytes=st.sampled_from([0, 20_000]),
        slots=st.integers(1, 4),
        directories=st.integers(1, 3),
    )
    def open(
        self,
        engine: str,
        windows: int,
        chunk_bytes: int,
        fraction: float,
        host_bytes: int,
        slots: int,
        directories: int,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.stores: list[Breakable] = []

        def wrap(store: Store) -> Store:
            self.stores.append(Breakable(store))
            return self.stores[-1]

        self.offloader = make(
            self.folder / "state",
            engine,
            open_store=opening(wrap) if engine == "disk" else None,
            directories=tuple(self.folder / f"state-{number}" for number in range(directories)),
            windows=windows,
            chunk_bytes=chunk_bytes,
            fraction=fraction,
            host_bytes=host_bytes,
            staging_bytes=2 * slots * max(4096, min(chunk_bytes, 50_000)),
        )
        self.model, self.steps, self.failed = Model(), 0, False
        self.saved: Model | None = None
        self.fill()

    @precondition(lambda self: not self.failed)
    @rule()
    def fill(self) -> None:
        fill(self.offloader)
        self.model.fill()

    @precondition(lambda self: not self.failed)
    @rule(times=st.integers(1, 3))
    def sweep(self, times: int) -> None:
        for _ in range(times):
            self.steps += 1
            sweep(self.offloader, self.steps)
            self.model.step(self.steps)

    @precondition(lambda self: not self.failed)
    @rule(parameter=st.integers(0, len(PARAMETERS) - 1))
    def overwrite_one_master(self, parameter: int) -> None:
        for state in self.offloader.fill(load=True):
            if parameter in state.parameters:
                state.masters[state.parameters.index(parameter)].fill_(3)
        self.model.masters[parameter].fill_(3)

    @precondition(lambda self: not self.failed)
    @rule()
    def prefetch(self) -> None:
        self.offloader.prefetch()

    @precondition(lambda self: not self.failed)
    @rule(parameter=st.integers(0, len(PARAMETERS) - 1))
    def write_one_momentum_where_it_lies(self, parameter: int) -> None:
        with self.offloader.written_outside():
            for state in self.offloader.resting():
                if parameter in state.parameters:
                    state.momenta[state.parameters.index(parameter)].fill_(5)
        self.model.momenta[parameter].fill_(5)

    @precondition(lambda self: not self.failed)
    @rule()
    def save_a_checkpoint(self) -> None:
        """As a checkpoint is written: views go to a writer that reads large ones from the drive by itself."""
        self.offloader.synchronize()
        sources = Sources(list(self.offloader.stores.values()))
        writer = PieceWriter(self.checkpoint, sources)
        for memory in self._places():
            writer.write(memory)
        writer.close()
        sources.close()
        assert self.checkpoint.read_bytes() == b"".join(map(bytes, self._places()))
        self.offloader.drop_cache()
        self.saved = copy.deepcopy(self.model)

    @precondition(lambda self: not self.failed and self.saved)
    @rule()
    def load_the_checkpoint(self) -> None:
        data = memoryview(self.checkpoint.read_bytes())
        with self.offloader.written_outside():
            for memory in self._places():
                memory[:] = data[: memory.nbytes]
                data = data[memory.nbytes :]
        assert not data.nbytes
        assert self.saved is not None
        self.model = copy.deepcopy(self.saved)

    def _places(self) -> Iterator[memoryview]:
        """All memory that holds state between steps: views of whole stores, and what the device keeps."""
        for store in self.offloader.stores.values():
            yield store.view(Extent(0, store.size))
        for chunk, state in zip(self.offloader.plan.chunks, self.offloader.resting(), strict=True):
            if chunk.tier is Tier.GPU:
                for tensor in (*state.masters, *state.momenta):
                    yield memoryview(tensor.view(-1).numpy()).cast("B")

    @property
    def checkpoint(self) -> Path:
        return self.folder.with_suffix(".saved")

    @precondition(lambda self: not self.failed)
    @rule()
    def compare(self) -> None:
        assert differences(self.offloader, self.model) == []

    @precondition(lambda self: not self.failed and self.stores and self.steps > 3)
    @rule(operation=st.sampled_from(["read", "write"]))
    def break_the_drive(self, operation: str) -> None:
        self.failed = True
        self.stores[0].broken = operation
        with pytest.raises(StoreError, match="broken"):
            # Every chunk of the disk passes in two sweeps, unless all of them fit into the windows.
            for _ in range(3):
                sweep(self.offloader, 0)
                self.offloader.synchronize()
            self.stores[0].broken = "write"
            sweep(self.offloader, 0)
            self.offloader.synchronize()

    @precondition(lambda self: self.failed)
    @rule()
    def a_failure_is_told_again(self) -> None:
        for call in (self.offloader.synchronize, lambda: sweep(self.offloader, 0)):
            with pytest.raises(StoreError, match="broken"):
                call()

    def teardown(self) -> None:
        if hasattr(self, "offloader"):
            with closed_in_time(self.offloader):
                if not self.failed:
                    # What a sweep takes from a window that should have been dropped shows after it.
                    self.sweep(1)
                    self.compare()
            assert our_threads() == []
            assert list(self.folder.iterdir()) == []
            self.folder.rmdir()
            self.checkpoint.unlink(missing_ok=True)


AnyOrder.TestCase.settings = hypothesis_settings(
    max_examples=40, stateful_step_count=10, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyOrder = AnyOrder.TestCase
