"""An offloader beside a plain in-memory model of what it should hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from muon_offload_cli.offload.offloader import ChunkState, OpenStore, StateOffloader
from muon_offload_cli.offload.plan import ParameterSpec, Tier
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.memory import MemoryStore
from muon_offload_cli.storage.store import Store
from muon_offload_cli.storage.striped import StripedStore
from tests.fakes.fake_torchrun import HANG_S

CPU = torch.device("cpu")
THREAD_NAMES = ("muon-",)
SHAPES = [
    (40, 30),
    (7,),
    (64, 16),
    (),
    (33, 31),
    (90, 90),
    (5, 5, 5),
    (64, 16),
    (16, 64),
    (1,),
    (50, 20),
    (8, 8),
]
PARAMETERS = [ParameterSpec(shape=shape, domain=index % 5 == 4) for index, shape in enumerate(SHAPES)]
CHUNK_BYTES = 12 * 1024
"""Cuts `PARAMETERS` into chunks of which one, with the (90, 90) parameter, is larger than the budget."""


def settings(directory: Path, engine: str = "disk", **more: object) -> OffloadSettings:
    """Settings that cut `PARAMETERS` into many chunks and chunks into several pieces."""
    given: dict[str, object] = {"chunk_bytes": CHUNK_BYTES, "io_threads": 2, "staging_bytes": 64 * 1024}
    return OffloadSettings(engine=engine, **{"directories": (directory,)} | given | more)  # type: ignore[arg-type]


class Model:
    """What masters and momenta should be: plain tensors, stepped by the same arithmetic."""

    def __init__(self, parameters: Sequence[ParameterSpec] = PARAMETERS) -> None:
        self.masters = [torch.zeros(parameter.shape) for parameter in parameters]
        self.momenta = [torch.zeros(parameter.shape) for parameter in parameters]

    def fill(self) -> None:
        for index, (master, momentum) in enumerate(zip(self.masters, self.momenta, strict=True)):
            write_first(index, master)
            momentum.zero_()

    def step(self, number: int) -> None:
        for index, (master, momentum) in enumerate(zip(self.masters, self.momenta, strict=True)):
            step(index, number, master, momentum)


def write_first(index: int, master: torch.Tensor) -> None:
    """Give a master its first values; momenta are born as zeros."""
    master.copy_(torch.arange(master.numel(), dtype=torch.float32).sin().add_(index).view(master.shape))


def step(index: int, number: int, master: torch.Tensor, momentum: torch.Tensor) -> None:
    """Step one parameter: every element depends on its own past, the parameter and the step."""
    momentum.mul_(0.9).add_(master, alpha=0.1 + number / 7).add_(index)
    master.sub_(momentum, alpha=0.01)


def make(
    directory: Path,
    engine: str = "disk",
    *,
    parameters: Sequence[ParameterSpec] = PARAMETERS,
    open_store: OpenStore | None = None,
    **more: object,
) -> StateOffloader:
    return StateOffloader(parameters, settings(directory, engine, **more), CPU, open_store=open_store)


def fill(offloader: StateOffloader) -> None:
    for state in offloader.fill():
        for index, master in zip(state.parameters, state.masters, strict=True):
            write_first(index, master)


def sweep(offloader: StateOffloader, number: int, visit: Callable[[ChunkState], None] | None = None) -> None:
    for state in offloader.sweep():
        if visit is not None:
            visit(state)
        for index, master, momentum in zip(state.parameters, state.masters, state.momenta, strict=True):
            step(index, number, master, momentum)
    if number % 2 == 0:
        # Whether reading for the next sweep begins early must not matter.
        offloader.prefetch()


def train(offloader: StateOffloader, sweeps: int) -> None:
    fill(offloader)
    for number in range(sweeps):
        sweep(offloader, number)


def differences(offloader: StateOffloader, model: Model) -> list[str]:
    """Name every tensor whose bytes are not the model's, after `synchronize`."""
    offloader.synchronize()
    found = []
    seen: list[int] = []
    for state in offloader.resting():
        seen += state.parameters
        for index, master, momentum in zip(state.parameters, state.masters, state.momenta, strict=True):
            # Compared as integers, so that NaN and minus zero count.
            for kind, mine, wanted in (
                ("master", master, model.masters[index]),
                ("momentum", momentum, model.momenta[index]),
            ):
                if not torch.equal(mine.view(torch.int32), wanted.view(torch.int32)):
                    found.append(f"{kind} {index}")
    if seen != list(range(len(model.masters))):
        found.append(f"parameters {seen}")
    return found


def opening(wrap: Callable[[Store], Store]) -> OpenStore:
    """Open the usual stores, the one on disk wrapped."""

    def open_store(which: Tier, given: OffloadSettings, size: int, pinned: bool) -> Store:
        if which is Tier.HOST:
            return MemoryStore(size, pin=pinned)
        if len(given.directories) > 1:
            return wrap(StripedStore(given.directories, size, DirectStore))
        return wrap(DirectStore(given.directories[0], size))

    return open_store


def our_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(THREAD_NAMES))


@contextmanager
def closed_in_time(offloader: StateOffloader, seconds: float = HANG_S) -> Iterator[None]:
    """Close the offloader at the end, on a thread, so that a hang is a failure and not a timeout of all."""
    try:
        yield
    finally:
        done: list[BaseException | None] = []

        def close() -> None:
            try:
                offloader.close()
            except BaseException as error:  # noqa: BLE001 - handed to the test
                done.append(error)
            else:
                done.append(None)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        thread.join(seconds)
        assert done, f"close() did not return within {seconds} s: {our_threads()}"
        if done[0] is not None:
            raise done[0]
