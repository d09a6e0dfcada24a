"""Megatron's own offloader with mapped buffers: what must hold, and that each check sees a broken one.

Run against a stand-in of the native class, and with MUON_OFFLOAD_MEGATRON_PATH against the real one.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron import native, native_contract, native_installation
from muon_offload_cli.megatron.attach import install
from muon_offload_cli.offload import mapped_buffers
from muon_offload_cli.offload.mapped_buffers import MappedBuffers
from muon_offload_cli.offload.settings import OffloadSettings
from muon_offload_cli.storage.reserved_file import create_reserved
from muon_offload_cli.storage.system_calls import SYSTEM
from tests.fakes.fake_torchrun import HANG_S
from tests.fakes.native_offloader import stand_in

CHECKOUT = os.environ.get("MUON_OFFLOAD_MEGATRON_PATH", "")
ROOT = Path(__file__).parents[2]
SHAPES = ((64, 48), (3, 5), (0, 4))
CLASS = native_contract.CLASS
STATE_BYTES = 2 * sum(4 * max(torch.Size(shape).numel(), 1) for shape in SHAPES)


class Rig:
    """An offloader built after an installation, over an optimizer with a momentum a parameter."""

    def __init__(self, directory: Path, modules: tuple[Any, Any]) -> None:
        self.directory = directory
        self.modules = modules
        self.settings = OffloadSettings(engine="mapped", directories=(directory,), chunk_bytes=1 << 20)
        self.installation = install(self.settings)
        generator = torch.Generator().manual_seed(1)
        self.masters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.1, momentum=0.9, foreach=False)
        self.offloader = modules[1].ChunkedOptimizerStateOffloader(
            optimizer=self.optimizer,
            master_params=self.masters,
            chunk_size_bytes=1 << 10,
            offload_fraction=1.0,
            state_dtypes=(torch.float32,),
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            for master in self.masters:
                master.grad = torch.ones(master.shape)
            self.offloader.step()
            self.offloader.offload_for_forward()

    @property
    def momenta(self) -> list[torch.Tensor]:
        return [self.optimizer.state[master]["momentum_buffer"] for master in self.masters]

    @property
    def addresses(self) -> list[int]:
        tensors = [*self.momenta, *(master.data for master in self.masters)]
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def mapped_files() -> dict[int, tuple[str, int]]:
    """Start of every shared file mapping of this process: its path, and its dirty bytes."""
    found: dict[int, tuple[str, int]] = {}
    start = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-[0-9a-f]+ ...s \S+ \S+ [1-9]\d*\s+(/.*)", line)
        if head:
            start = int(head[1], 16)
            found[start] = (head[2], 0)
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start = None
        elif start is not None and re.match(r"(Shared|Private)_Dirty:", line):
            path, dirty = found[start]
            found[start] = (path, dirty + 1024 * int(line.split()[1]))
    return found


def every_buffer_is_the_pages_of_a_file(rig: Rig) -> None:
    rig.train(2)
    files = mapped_files()
    assert all(files.get(address, ("",))[0].startswith(str(rig.directory)) for address in rig.addresses)
    assert len(set(rig.addresses)) == 2 * len(SHAPES)
    assert rig.offloader.buffers.nbytes == STATE_BYTES


def no_name_is_left_and_the_bytes_stay(rig: Rig) -> None:
    rig.train()
    assert list(rig.directory.iterdir()) == []
    before = [momentum.clone() for momentum in rig.momenta]
    rig.installation.close()
    gc.collect()
    assert all(map(torch.equal, before, rig.momenta))
    rig.momenta[0].add_(1)


def a_tensor_without_elements_has_a_file_too(rig: Rig) -> None:
    made = rig.offloader._new_cpu_buffer(torch.empty(0, 4, dtype=torch.bfloat16))
    assert (made.shape, made.dtype) == ((0, 4), torch.bfloat16)
    assert made.untyped_storage().data_ptr() in mapped_files()


def a_buffer_is_not_pinned(rig: Rig) -> None:
    assert not rig.offloader._new_cpu_buffer(torch.empty(3)).is_pinned()


def a_storage_is_as_large_as_its_tensor(rig: Rig) -> None:
    made = rig.offloader._new_cpu_buffer(torch.empty(7, 3, dtype=torch.bfloat16))
    assert (made.untyped_storage().nbytes(), made.is_contiguous()) == (42, True)


def checkpoints_hand_the_same_buffers_back(rig: Rig) -> None:
    rig.train(2)
    before = rig.addresses
    for _ in range(3):
        rig.offloader.synchronize_for_checkpoint()
    assert rig.addresses == before
    # A loaded checkpoint shows the same bytes through another tensor object.
    for master in rig.masters:
        rig.optimizer.state[master]["momentum_buffer"] = rig.optimizer.state[master]["momentum_buffer"][:]
    rig.offloader.adopt_cpu_optimizer_state()
    gc.collect()
    assert rig.addresses == before
    assert rig.offloader.buffers.nbytes == STATE_BYTES


def a_foreign_host_tensor_is_moved_into_a_buffer(rig: Rig) -> None:
    rig.train()
    foreign = [torch.randn(shape) for shape in SHAPES]
    for master, tensor in zip(rig.masters, foreign, strict=True):
        rig.optimizer.state[master]["momentum_buffer"] = tensor
    rig.offloader.adopt_cpu_optimizer_state()
    gc.collect()
    assert all(map(rig.offloader.buffers.holds, rig.momenta))
    assert all(map(torch.equal, foreign, rig.momenta))
    assert rig.offloader.buffers.nbytes == STATE_BYTES


def both_modules_have_the_class_until_it_is_closed(rig: Rig) -> None:
    classes = [module.ChunkedOptimizerStateOffloader for module in rig.modules]
    assert all(cls.__name__ == "MappedOptimizerStateOffloader" for cls in classes)
    rig.installation.close()
    assert [module.ChunkedOptimizerStateOffloader for module in rig.modules] == [classes[0].__bases__[0]] * 2


def a_second_installation_does_not_stack(rig: Rig) -> None:
    installed = rig.modules[1].ChunkedOptimizerStateOffloader
    assert install(rig.settings) is rig.installation
    with pytest.raises(UserError, match="a second time with other settings"):
        install(replace(rig.settings, chunk_bytes=1))
    assert rig.modules[1].ChunkedOptimizerStateOffloader is installed


def a_full_drive_is_an_error_at_once(rig: Rig) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        if length > 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, length)

    rig.offloader.buffers._calls = replace(SYSTEM, posix_fallocate=full)
    with pytest.raises(UserError) as caught:
        rig.train()
    assert caught.value.exit_code == 3
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC


def each_step_says_how_much_lies_in_files(rig: Rig) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        rig.train(2)
    lines = printed.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(rf"optimizer state of SGD, step 2: [1-9].* in files of {rig.directory}", lines[1])


def dirty_pages_are_on_the_drive_when_the_writer_starts(rig: Rig) -> None:
    rig.train()
    assert any(dirty for path, dirty in mapped_files().values() if path.startswith(str(rig.directory)))
    rig.offloader.synchronize_for_checkpoint()
    assert not any(dirty for path, dirty in mapped_files().values() if path.startswith(str(rig.directory)))


def what_a_killed_rank_left_is_removed_and_nothing_else(rig: Rig) -> None:
    dead = 1 << 22  # one more than Linux's largest process number
    stale = rig.directory / f".muon-offload-rank-0-{dead}-ab"
    others = [
        rig.directory / f".muon-offload-rank-0-{os.getpid()}-ab",
        rig.directory / f".muon-offload-rank-10-{dead}-ab",
        rig.directory / "mine",
    ]
    for path in (stale, *others):
        path.touch()
    MappedBuffers(rig.directory, owner="rank 0").close()
    assert sorted(rig.directory.iterdir()) == sorted(others)


Patch = Callable[[pytest.MonkeyPatch], None]


def allocating(new_like: Callable[[Any, torch.Tensor], torch.Tensor]) -> Patch:
    """Break the allocator."""
    return lambda patch: patch.setattr(MappedBuffers, "new_like", new_like)


def named(buffers: Any, tensor: torch.Tensor) -> torch.Tensor:
    path = str(buffers.directory / f"buffer-{time.monotonic_ns()}")
    return torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)


def like_pinned(buffers: Any, tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor)
    made.is_pinned = lambda: True  # type: ignore[method-assign]
    return made


def part_of_a_larger_one(buffers: Any, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(1024, dtype=tensor.dtype)[: tensor.numel()].view(tensor.shape)


def holding(answer: bool) -> Patch:
    return lambda patch: patch.setattr(MappedBuffers, "holds", lambda *_: answer)


def one_module_alone(patch: pytest.MonkeyPatch) -> None:
    defining, _ = native_contract.modules() or (None, None)
    patch.setattr(native_contract, "modules", lambda: (defining, defining))
    patch.setattr(native_contract, "missing_parts", lambda *_: [])


def stacking(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "install", native_installation.NativeInstallation)


def sparse(patch: pytest.MonkeyPatch) -> None:
    def create(directory: Path, size: int, direct: bool, **_: Any) -> Any:
        file = create_reserved(directory, 0, direct)
        os.ftruncate(file.fd, max(size, 4096))
        return file

    patch.setattr(mapped_buffers, "create_reserved", create)


CASES: dict[Callable[[Rig], None], Patch] = {
    every_buffer_is_the_pages_of_a_file: allocating(lambda _, tensor: torch.zeros_like(tensor)),
    no_name_is_left_and_the_bytes_stay: allocating(named),
    a_tensor_without_elements_has_a_file_too: allocating(lambda _, tensor: torch.empty_like(tensor)),
    a_buffer_is_not_pinned: allocating(like_pinned),
    a_storage_is_as_large_as_its_tensor: allocating(part_of_a_larger_one),
    checkpoints_hand_the_same_buffers_back: holding(False),
    a_foreign_host_tensor_is_moved_into_a_buffer: holding(True),
    both_modules_have_the_class_until_it_is_closed: one_module_alone,
    a_second_installation_does_not_stack: stacking,
    a_full_drive_is_an_error_at_once: sparse,
    each_step_says_how_much_lies_in_files: lambda patch: patch.setattr(
        native, "print", lambda *_, **__: None, raising=False
    ),
    dirty_pages_are_on_the_drive_when_the_writer_starts: lambda patch: patch.setattr(
        MappedBuffers, "flush", lambda self: self.nbytes
    ),
    what_a_killed_rank_left_is_removed_and_nothing_else: lambda patch: patch.setattr(
        mapped_buffers, "remove_stale", lambda directory: [path.unlink() for path in directory.iterdir()]
    ),
}
"""Each check, with an implementation that it must not accept."""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The modules that define and build the native class; without one, those of the stand-in."""
    monkeypatch.delenv("RANK", raising=False)
    if native_contract.modules() is None:
        yield stand_in(monkeypatch)
        return
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    from muon_offload_cli.megatron.cpu_device import cpu_device

    found = native_contract.modules() or ()
    # A broken installation does not give everything back.
    monkeypatch.setattr(OptimizerConfig, "__post_init__", OptimizerConfig.__post_init__)
    for module in found:
        monkeypatch.setattr(module, CLASS, getattr(module, CLASS))
    with cpu_device():
        yield found  # type: ignore[misc]


@pytest.mark.parametrize("check", CASES, ids=lambda check: check.__name__)
def test_the_mapped_offloader(
    check: Callable[[Rig], None], directory: Path, modules: tuple[Any, Any]
) -> None:
    rig = Rig(directory, modules)
    try:
        check(rig)
    finally:
        rig.installation.close()


@pytest.mark.parametrize("check", CASES, ids=lambda check: check.__name__)
def test_a_broken_one_is_seen(
    check: Callable[[Rig], None],
    directory: Path,
    modules: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        CASES[check](patch)
        rig = Rig(directory, modules)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check(rig)
    rig.installation.close()


@pytest.mark.skipif(not CHECKOUT, reason="MUON_OFFLOAD_MEGATRON_PATH names no checkout of Megatron")
def test_the_same_cases_hold_for_the_offloader_of_a_checkout() -> None:
    # In a process of its own: this one has imported the installed Megatron.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:warnings",
            __file__,
            "-k",
            "mapped_offloader or broken_one",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([CHECKOUT, str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"{2 * len(CASES)} passed" in done.stdout


def test_a_dropped_offloader_gives_its_files_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(directory, stand_in(monkeypatch))
    rig.train()
    assert any(path.startswith(str(directory)) for path, _ in mapped_files().values())
    rig.masters, rig.optimizer, rig.offloader = [], None, None  # type: ignore[assignment]
    gc.collect()
    assert not any(path.startswith(str(directory)) for path, _ in mapped_files().values())
    rig.installation.close()
