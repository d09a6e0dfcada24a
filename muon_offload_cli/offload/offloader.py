"""The offloader: Muon's masters and momenta of one rank, in their tiers between steps.

Knows torch, not Megatron. The owner of the optimizer drives it: it is born with the shapes, filled chunk by
chunk, swept once a step, and synchronized before anyone reads the state from outside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from muon_offload_cli.machine.numa import NearDevice
from muon_offload_cli.offload.io_meter import IoMeter
from muon_offload_cli.offload.mover import AddressableMover, Mover, StagedMover
from muon_offload_cli.offload.pipeline import Pipeline
from muon_offload_cli.offload.placement import bound_to, near
from muon_offload_cli.offload.plan import (
    Chunk,
    ChunkPlan,
    ParameterSpec,
    Slot,
    Tier,
    plan_for,
)
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.offload.window import make_windows
from muon_offload_cli.storage.checksums import Checksums, Verify
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent, lay_out
from muon_offload_cli.storage.mapped import MappedStore
from muon_offload_cli.storage.memory import MemoryStore
from muon_offload_cli.storage.ring import StagingRing
from muon_offload_cli.storage.store import Store
from muon_offload_cli.storage.striped import StripedStore

type OpenStore = Callable[[Tier, OffloadSettings, int, bool], Store]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkState:
    """The state of one chunk's parameters, as fp32 tensors in the parameters' shapes.

    Attributes:
        chunk: Number of the chunk in the plan.
        parameters: Indices of the parameters, in optimizer order.
        masters: Master weight of each.
        momenta: Momentum of each.
        second_moments: Second moment of each, in its own shape; empty if the optimizer keeps none.
    """

    chunk: int
    parameters: tuple[int, ...]
    masters: tuple[torch.Tensor, ...]
    momenta: tuple[torch.Tensor, ...]
    second_moments: tuple[torch.Tensor, ...] = ()


class StateOffloader:
    """Keeps the state of `parameters` in its tiers and brings it to the device chunk by chunk.

    Args:
        parameters: Shapes in the optimizer's order.
        settings: Engine, budgets, directories.
        device: Where the optimizer steps.
        open_store: Makes the store of a tier, given the bytes it holds and whether to page-lock memory.
        near_device: CPUs that buffers and threads are kept to; None: those near `device`, as the system says.

    Attributes:
        is_loading: Whether a load is under way: see `loading`.

    Raises:
        UserError: The directory cannot be used or the state does not fit there; nothing is left behind.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterSpec],
        settings: OffloadSettings,
        device: torch.device,
        *,
        open_store: OpenStore | None = None,
        near_device: NearDevice | None = None,
    ) -> None:
        self.settings = settings
        self.plan: ChunkPlan = plan_for(settings, parameters)
        self._parameters = parameters
        self._device = device
        self._window_states: dict[int, ChunkState] = {}
        self.near = near(device) if near_device is None else near_device
        self._resources = ExitStack()
        with ExitStack() as guard:
            guard.callback(self._resources.close)
            with bound_to(self.near.cpus):
                self._allocate(settings, device, open_store or _open_store)
            guard.pop_all()
        self.sweeps = 0
        self.is_loading = False

    def _allocate(self, settings: OffloadSettings, device: torch.device, open_store: OpenStore) -> None:
        pinned = device.type == "cuda"
        streamed = self.plan.of_tier(Tier.HOST, Tier.DISK)
        # Device memory first: it is what may be missing, and it needs no undoing.
        windows = make_windows(streamed, settings.windows, device)
        self.window_bytes = sum(window.memory.numel() for window in windows)
        self._gpu_images = {
            chunk.index: torch.zeros(chunk.nbytes, dtype=torch.uint8, device=device)
            for chunk in self.plan.of_tier(Tier.GPU)
        }
        self._checksums = Checksums(Verify(settings.verify), self._describe)
        self._extents: dict[int, Extent] = {}
        self.stores: dict[Tier, Store] = {}
        self._movers: dict[Tier, Mover] = {}
        self._rings: list[StagingRing] = []
        for tier in (Tier.HOST, Tier.DISK):
            chunks = self.plan.of_tier(tier)
            if not chunks:
                continue
            extents = lay_out([chunk.nbytes for chunk in chunks])
            self._extents.update(zip((chunk.index for chunk in chunks), extents, strict=True))
            size = extents[-1].offset + extents[-1].nbytes
            store = self._resources.enter_context(open_store(tier, settings, size, pinned))
            self.stores[tier] = store
            if tier is Tier.DISK and settings.engine == "disk":
                slots, piece_bytes = settings.staging_rings(store.size)
                self._rings = [StagingRing(slots, piece_bytes, pin=pinned) for _ in range(2)]
                self._movers[tier] = StagedMover(
                    store,
                    device,
                    read_ring=self._rings[0],
                    write_ring=self._rings[1],
                    threads=settings.io_threads,
                    checksums=self._checksums,
                )
            else:
                self._movers[tier] = AddressableMover(store, device)
        self._pipeline = Pipeline(streamed, self._extents, self._movers, windows, device)
        self._resources.callback(self._pipeline.close)

    def fill(self, load: bool = False) -> Iterator[ChunkState]:
        """Visit every chunk on the device in order to write it; what is written goes to its tier.

        Args:
            load: Bring the present bytes first; False gives zeros, for masters that are being born. The
                first time masters alone are written: the tiers hold zeros.
        """
        for chunk in self.plan.of_tier(Tier.GPU):
            if not load:
                self._gpu_images[chunk.index].zero_()
            yield self._state(chunk, self._gpu_images[chunk.index])
        for chunk, image in self._pipeline.sweep(load=load):
            if not load:
                image.zero_()
            yield self._image_state(chunk, image)

    def sweep(self) -> Iterator[ChunkState]:
        """Visit every chunk once on the device, for one optimizer step; chunks are written back behind.

        Work that the caller enqueues on the current stream between two visits is part of the first.

        Raises:
            StoreError: A read or a write failed, with path and errno.
        """
        yield from self.fill(load=True)
        self.sweeps += 1

    def prefetch(self) -> None:
        """Begin fetching for the next sweep, so that it happens while forward and backward run."""
        self._pipeline.prefetch()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Note that a load is under way: who shows where state lies need not wait until its bytes are there.

        The loader calls `synchronize` before it writes the first of them.
        """
        self.is_loading = True
        try:
            yield
        finally:
            self.is_loading = False

    @contextmanager
    def written_outside(self) -> Iterator[None]:
        """Let the caller write state through the views of `resting` while the context is entered.

        Raises:
            StoreError: The bytes written could not be brought to the drive.
        """
        self._pipeline.synchronize()
        self._pipeline.forget()
        yield
        self._checksums.forget()
        for store in self.stores.values():
            store.flush()
        if self.settings.engine == "disk":
            self.drop_cache()

    def drop_cache(self) -> None:
        """Let go of what readers of `resting` brought into the page cache, which a memory limit counts."""
        for store in self.stores.values():
            store.drop_cache()

    def resting(self) -> list[ChunkState]:
        """Return CPU views (device views for the GPU tier) of all state where it lies between steps.

        They show current values after `synchronize`. Write through them only inside `written_outside`: a
        chunk that has been read ahead would not see it.
        """
        return [self._resting(chunk) for chunk in self.plan.chunks]

    def _resting(self, chunk: Chunk) -> ChunkState:
        if chunk.tier is Tier.GPU:
            return self._state(chunk, self._gpu_images[chunk.index])
        memory = self.stores[chunk.tier].view(self._extents[chunk.index])

        def view(shape: tuple[int, ...], slot: Slot) -> torch.Tensor:
            # A storage of the tensor's own size: Megatron's checkpoint writer clones tensors whose storage
            # is larger than themselves.
            if not slot.nbytes:
                return torch.empty(shape)
            own = memory[slot.offset : slot.offset + slot.nbytes]
            return torch.frombuffer(own, dtype=torch.float32).view(shape)

        return self._chunk_state(chunk, view)

    def synchronize(self) -> None:
        """Block until every tier holds the current bytes."""
        self._pipeline.synchronize()

    @property
    def wait_s(self) -> float:
        """Seconds so far in which the device stood still for data to arrive."""
        return self._pipeline.stall.seconds

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk so far."""
        return sum(meter.bytes_read for meter in self._disk_meters())

    @property
    def bytes_written(self) -> int:
        """Bytes written to disk so far."""
        return sum(meter.bytes_written for meter in self._disk_meters())

    @property
    def io_busy_s(self) -> float:
        """Seconds so far in which a request to the disk was under way."""
        return sum(meter.busy_s for meter in self._disk_meters())

    @property
    def staging_high_bytes(self) -> int:
        """The most bytes of the staging rings that were ever in use at once."""
        return sum(ring.high_water * ring.slot_bytes for ring in self._rings)

    @property
    def pinned_bytes(self) -> int:
        """Host memory that is page-locked: the host tier and the staging rings."""
        host = self.stores.get(Tier.HOST)
        tier = host.size if isinstance(host, MemoryStore) and host.pinned else 0
        return tier + sum(ring.nbytes for ring in self._rings if ring.pinned)

    def _disk_meters(self) -> list[IoMeter]:
        return [mover.meter for mover in self._movers.values() if mover.store.on_disk]

    def stored_bytes(self, tier: Tier) -> int:
        """Bytes that `tier` holds between steps, alignment included."""
        return self.plan.bytes_of(tier)

    def close(self) -> None:
        """Stop all threads, release memory, and with it the file that has no name.

        On a thread of an offloader, where Python may happen to collect the owner of this one as garbage, a
        thread of its own does that, and this returns before: none can wait for its own end.

        Raises:
            StoreError: The last write-back failed; everything is released all the same.
        """
        if threading.current_thread().name.startswith("muon-"):
            threading.Thread(target=self._resources.close, name="muon-close").start()
        else:
            self._resources.close()

    def _describe(self, extent: Extent) -> str:
        """Say what lies in an extent of the file, for an error."""
        for chunk in self.plan.of_tier(Tier.DISK):
            place = self._extents[chunk.index]
            if place.offset <= extent.offset < place.end:
                first, last = chunk.parameters[0], chunk.parameters[-1]
                return (
                    f"chunk {chunk.index}, parameters {first} to {last} of this rank's Muon parameters "
                    f"(the first is {tuple(self._parameters[first].shape)}), after step {self.sweeps}"
                )
        return f"no chunk, after step {self.sweeps}"

    def _image_state(self, chunk: Chunk, image: torch.Tensor) -> ChunkState:
        """Return the views of a chunk in its window; made once: a chunk always has the same window."""
        state = self._window_states.get(chunk.index)
        if state is None:
            state = self._window_states[chunk.index] = self._state(chunk, image)
        return state

    def _state(self, chunk: Chunk, image: torch.Tensor) -> ChunkState:
        def view(shape: tuple[int, ...], slot: Slot) -> torch.Tensor:
            return image[slot.offset : slot.offset + slot.nbytes].view(torch.float32).view(shape)

        return self._chunk_state(chunk, view)

    def _chunk_state(self, chunk: Chunk, view: Callable[[tuple[int, ...], Slot], torch.Tensor]) -> ChunkState:
        members = [self._parameters[index] for index in chunk.parameters]
        shapes = [member.shape for member in members]
        moments = [member.second_moment or () for member in members]
        return ChunkState(
            chunk=chunk.index,
            parameters=chunk.parameters,
            masters=tuple(map(view, shapes, chunk.masters)),
            momenta=tuple(map(view, shapes, chunk.momenta)),
            second_moments=tuple(map(view, moments, chunk.second_moments)),
        )


def state_bytes(parameters: Sequence[ParameterSpec]) -> int:
    """Bytes of all state of `parameters` without padding: 8 an element where there is no second moment."""
    return sum(sum(parameter.sizes) for parameter in parameters)


def _open_store(tier: Tier, settings: OffloadSettings, size: int, pinned: bool) -> Store:
    if tier is Tier.HOST:
        return MemoryStore(size, pin=pinned)
    if not settings.directories:
        raise ValueError(f"engine {settings.engine} needs a directory")
    open_one = MappedStore if settings.engine == "mapped" else DirectStore
    if len(settings.directories) == 1:
        return open_one(settings.directories[0], size)
    return StripedStore(settings.directories, size, open_one)
