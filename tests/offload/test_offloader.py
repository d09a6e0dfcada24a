"""The offloader against a plain in-memory model: same bytes, whatever tiers, windows and speed."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import psutil
import pytest
import torch

from muon_offload_cli.offload.offloader import ChunkState, StateOffloader, state_bytes
from muon_offload_cli.offload.plan import ParameterSpec, Tier
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.store import Store
from tests.fakes.stores import SlowStore, WrappedStore
from tests.offload.rig import (
    CHUNK_BYTES,
    PARAMETERS,
    Model,
    closed_in_time,
    differences,
    fill,
    make,
    opening,
    our_threads,
    sweep,
    train,
)

REPOSITORY = Path(__file__).parents[2]


def check(offloader: StateOffloader, sweeps: int = 7, *, every: int = 3) -> None:
    """Fill, sweep and compare; also between sweeps, so that reading back disturbs nothing."""
    model = Model()
    model.fill()
    with closed_in_time(offloader):
        fill(offloader)
        assert differences(offloader, model) == []
        for number in range(sweeps):
            sweep(offloader, number)
            model.step(number)
            if number % every == 0:
                assert differences(offloader, model) == []
        assert differences(offloader, model) == []
        assert offloader.sweeps == sweeps


@pytest.mark.parametrize("windows", range(1, 7))
@pytest.mark.parametrize("engine", ["host", "mapped", "disk"])
def test_sweeps_give_the_bytes_of_resident_state(directory: Path, engine: str, windows: int) -> None:
    check(make(directory, engine, windows=windows))


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 100])
def test_any_number_of_staging_buffers_will_do(directory: Path, slots: int) -> None:
    # Half of the ring reads and half writes.
    check(make(directory, staging_bytes=2 * slots * CHUNK_BYTES))


@pytest.mark.parametrize(
    "chunk_bytes", [0, 1, 4096, 5000, 40_000, 10**9], ids=lambda value: f"chunks of {value}"
)
@pytest.mark.parametrize("windows", [1, 3, 6])
def test_any_size_of_chunks_will_do(directory: Path, chunk_bytes: int, windows: int) -> None:
    check(make(directory, chunk_bytes=chunk_bytes, windows=windows), sweeps=4)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("host_bytes", [0, 30_000, 10**9])
@pytest.mark.parametrize("engine", ["host", "mapped", "disk"])
def test_tiers_mix_without_a_difference(
    directory: Path, engine: str, host_bytes: int, fraction: float
) -> None:
    check(make(directory, engine, fraction=fraction, host_bytes=host_bytes, windows=2), sweeps=4)


def test_parameters_without_elements_and_empty_lists_do_no_harm(directory: Path) -> None:
    for parameters in (
        [],
        [ParameterSpec(shape=(0, 4))] * 3,
        [ParameterSpec(shape=(4, 4)), ParameterSpec(shape=(0,))],
    ):
        offloader = make(directory, parameters=parameters, chunk_bytes=1, windows=1)
        model = Model(parameters)
        model.fill()
        with closed_in_time(offloader):
            fill(offloader)
            for number in range(3):
                sweep(offloader, number)
                model.step(number)
            assert differences(offloader, model) == []


@pytest.mark.parametrize("windows", [1, 2, 4])
def test_slow_and_jittery_stores_change_nothing(directory: Path, windows: int) -> None:
    class Jittery(WrappedStore):
        """Requests take different times, so that they overtake each other."""

        def __init__(self, inner: Store) -> None:
            super().__init__(inner)
            self._random = random.Random(7)

        def _read(self, extent: Extent, target: memoryview) -> None:
            time.sleep(self._random.choice([0, 0, 0.002]))
            super()._read(extent, target)

        def _write(self, extent: Extent, source: memoryview) -> None:
            time.sleep(self._random.choice([0, 0, 0.004]))
            super()._write(extent, source)

    for wrap in (Jittery, lambda store: SlowStore(store, 0.001)):
        given = {"windows": windows, "host_bytes": 20_000, "chunk_bytes": 6_000, "io_threads": 4}
        check(make(directory, open_store=opening(wrap), **given), every=2)


def test_a_chunk_is_never_written_twice_at_once(directory: Path) -> None:
    class Overlapping(WrappedStore):
        """Notes writes that begin while another write of the same bytes is under way."""

        def __init__(self, inner: Store) -> None:
            super().__init__(inner)
            self.under_way: list[Extent] = []
            self.overlaps: list[Extent] = []

        def _write(self, extent: Extent, source: memoryview) -> None:
            if extent in self.under_way:
                self.overlaps.append(extent)
            self.under_way.append(extent)
            time.sleep(0.02)
            super()._write(extent, source)
            self.under_way.remove(extent)

    offloader = make(
        directory, open_store=opening(Overlapping), windows=3, io_threads=8, staging_bytes=1 << 20
    )
    store = offloader.stores[Tier.DISK]
    assert isinstance(store, Overlapping)
    with closed_in_time(offloader):
        # The chunks that the windows keep over the turn are stepped again at once.
        train(offloader, 3)
        offloader.synchronize()
        assert store.overlaps == []


def test_a_slow_visitor_changes_nothing(directory: Path) -> None:
    model = Model()
    model.fill()
    offloader = make(directory, windows=2)
    with closed_in_time(offloader):
        fill(offloader)
        for number in range(3):
            sweep(offloader, number, visit=lambda _: time.sleep(0.003))
            model.step(number)
        assert differences(offloader, model) == []


def test_sweeps_alternate_and_reuse_what_the_windows_hold(directory: Path) -> None:
    offloader = make(directory, windows=3)
    order: list[list[int]] = []
    with closed_in_time(offloader):
        fill(offloader)
        for number in range(3):
            order.append([])
            sweep(offloader, number, visit=lambda state: order[-1].append(state.chunk))
        offloader.synchronize()
        chunks = offloader.plan.chunks
        numbers = [chunk.index for chunk in chunks]
        # Birth is the first visit, in order.
        assert order == [numbers[::-1], numbers, numbers[::-1]]
        kept_back = sum(chunk.nbytes for chunk in chunks[-3:])
        kept_front = sum(chunk.nbytes for chunk in chunks[:3])
        whole = sum(chunk.nbytes for chunk in chunks)
        read = 3 * whole - 2 * kept_back - kept_front
        assert read <= offloader.bytes_read < read + whole - kept_front
        # Birth writes all masters; what the windows held at the very end was written when it was asked for.
        assert offloader.bytes_written == sum(chunk.born_bytes for chunk in chunks) + read + kept_back


def test_state_is_born_as_zeros_also_the_second_time(directory: Path) -> None:
    offloader = make(directory, fraction=0.7, windows=2)
    zeros, model = Model(), Model()
    model.fill()
    with closed_in_time(offloader):
        fill(offloader)
        sweep(offloader, 0)
        for state in offloader.fill():
            assert all(not tensor.any() for tensor in (*state.masters, *state.momenta))
        assert differences(offloader, zeros) == []
        fill(offloader)
        assert differences(offloader, model) == []


def test_writing_in_a_loading_fill_keeps_what_is_not_written(directory: Path) -> None:
    offloader, model = make(directory, host_bytes=20_000), Model()
    model.fill()
    model.step(0)
    with closed_in_time(offloader):
        fill(offloader)
        sweep(offloader, 0)
        for state in offloader.fill(load=True):
            for index, master in zip(state.parameters, state.masters, strict=True):
                master.fill_(index)
                model.masters[index].fill_(index)
        assert differences(offloader, model) == []
        assert offloader.sweeps == 1


def test_special_values_survive(directory: Path) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45])
    parameters = [ParameterSpec(shape=(5,))] * 4
    offloader = make(directory, parameters=parameters, chunk_bytes=1, windows=2)
    model = Model(parameters)
    for tensor in (*model.masters, *model.momenta):
        tensor.copy_(values)
    with closed_in_time(offloader):
        for load in (False, True):
            for state in offloader.fill(load=load):
                for tensor in (*state.masters, *state.momenta):
                    tensor.copy_(values)
        for _ in range(3):
            for _state in offloader.sweep():
                pass
        assert differences(offloader, model) == []


@pytest.mark.parametrize("windows", [1, 3, 6])
@pytest.mark.parametrize("engine", ["host", "mapped", "disk"])
def test_state_written_from_outside_is_what_the_next_sweep_steps(
    directory: Path, engine: str, windows: int
) -> None:
    offloader, model = make(directory, engine, windows=windows, fraction=0.8, host_bytes=20_000), Model()
    model.fill()
    with closed_in_time(offloader):
        fill(offloader)
        for number in range(4):
            sweep(offloader, number)
            model.step(number)
            with offloader.written_outside():
                for state in offloader.resting():
                    for index, master in zip(state.parameters, state.masters, strict=True):
                        master.fill_(index + number)
                        model.masters[index].fill_(index + number)
                del state, master
            assert differences(offloader, model) == []
        sweep(offloader, 9)
        model.step(9)
        assert differences(offloader, model) == []


def test_resting_views_have_storages_of_their_own_size(directory: Path) -> None:
    for engine in ("host", "mapped", "disk"):
        offloader = make(directory, engine)
        with closed_in_time(offloader):
            fill(offloader)
            for state in offloader.resting():
                for tensor in (*state.masters, *state.momenta):
                    assert tensor.untyped_storage().nbytes() == tensor.nbytes
            del state, tensor


def test_figures_tell_where_the_bytes_are(directory: Path) -> None:
    offloader = make(directory, fraction=0.8, host_bytes=40_000, windows=2)
    with closed_in_time(offloader):
        tiers = [offloader.stored_bytes(tier) for tier in (Tier.GPU, Tier.HOST, Tier.DISK)]
        assert all(tiers)
        assert sum(tiers) >= state_bytes(PARAMETERS)
        assert offloader.stores[Tier.DISK].size == tiers[2]
        assert offloader.stores[Tier.HOST].size == tiers[1] <= 40_000
        streamed = offloader.plan.of_tier(Tier.HOST, Tier.DISK)
        assert offloader.window_bytes <= 2 * max(chunk.nbytes for chunk in streamed)
        fill(offloader)
        offloader.synchronize()
        # Host bytes are no disk traffic, and zeros are there already.
        masters = sum(chunk.born_bytes for chunk in offloader.plan.of_tier(Tier.DISK))
        assert offloader.bytes_written == masters < tiers[2]


def test_descriptors_maps_threads_and_memory_stay_flat(directory: Path) -> None:
    process = psutil.Process()
    # A pool of several threads starts the last of them whenever work happens to meet no idle one.
    offloader = make(directory, windows=2, host_bytes=20_000, io_threads=1)

    def figures() -> tuple[int, int, list[str]]:
        return process.num_fds(), len(process.memory_maps(grouped=False)), our_threads()

    with closed_in_time(offloader):
        fill(offloader)
        for number in range(20):
            sweep(offloader, number)
        fds, maps, threads = figures()
        resident = process.memory_info().rss
        for number in range(200):
            sweep(offloader, number)
        fds_after, maps_after, threads_after = figures()
        assert (fds_after, threads_after) == (fds, threads)
        assert maps_after <= maps + 5
        assert process.memory_info().rss < resident + (8 << 20)


def test_an_abandoned_sweep_is_an_error_for_the_next_one_and_no_hang(directory: Path) -> None:
    offloader = make(directory, windows=1)
    with closed_in_time(offloader):
        fill(offloader)
        with pytest.raises(ZeroDivisionError):
            sweep(offloader, 0, visit=_divide_by_zero)
        with pytest.raises(RuntimeError, match="a sweep was left at chunk"):
            sweep(offloader, 1)


def _divide_by_zero(state: ChunkState) -> None:
    raise ZeroDivisionError
