from __future__ import annotations

import re
from pathlib import Path

import pytest

from muon_offload_cli.errors import UserError, does_not_fit
from muon_offload_cli.storage.buffer import HUGE_PAGE, HostBuffer
from muon_offload_cli.storage.extent import ALIGNMENT
from muon_offload_cli.units import MIB
from tests.fakes.stores import FakePinner


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 100_000, HUGE_PAGE, 5 * MIB + 13])
def test_the_memory_has_the_exact_size_is_zero_and_aligned(nbytes: int) -> None:
    with HostBuffer(nbytes) as buffer:
        assert buffer.memory.nbytes == nbytes
        assert bytes(buffer.memory) == bytes(nbytes)
        assert buffer.address % (HUGE_PAGE if nbytes >= HUGE_PAGE else ALIGNMENT) == 0
        assert not buffer.memory.readonly


def test_exactly_the_size_asked_for_is_pinned_and_let_go_once() -> None:
    pinner = FakePinner()
    buffer = HostBuffer(5 * MIB + 13, pin=True, pinner=pinner)
    assert buffer.pinned
    assert pinner.registered == {buffer.address: 5 * MIB + 13}
    buffer.close()
    buffer.close()
    assert not buffer.pinned
    assert pinner.registered == {}


def test_memory_that_cannot_be_pinned_is_a_user_error_and_is_given_back() -> None:
    class Refusing(FakePinner):
        def register(self, address: int, nbytes: int) -> None:
            raise does_not_fit("too much")

    before = _resident_bytes()
    for _ in range(4):
        with pytest.raises(UserError, match="too much"):
            HostBuffer(64 * MIB, pin=True, pinner=Refusing())
    assert _resident_bytes() - before < 32 * MIB


def test_more_memory_than_addresses_is_a_user_error_with_the_figure() -> None:
    with pytest.raises(UserError, match=r"TiB of host memory cannot be mapped") as caught:
        HostBuffer(1 << 60)
    assert caught.value.exit_code == 3


def test_closing_gives_the_memory_back_at_once_and_views_read_zeros() -> None:
    buffer = HostBuffer(64 * MIB)
    buffer.memory[:] = b"\xff" * (64 * MIB)
    view = buffer.memory[:ALIGNMENT]
    full = _resident_bytes()
    buffer.close()
    assert full - _resident_bytes() > 48 * MIB
    assert bytes(view) == bytes(ALIGNMENT)


def test_a_fork_does_not_inherit_the_memory_and_huge_pages_are_asked_for() -> None:
    with HostBuffer(8 * MIB) as buffer:
        flags = _flags_at(buffer.address)
    assert "dc" in flags  # do not copy on fork
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _flags_at(address: int) -> list[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError(hex(address))


@pytest.mark.gpu
def test_cuda_sees_the_memory_as_pinned() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with HostBuffer(3 * MIB + 4096, pin=True) as buffer:
        host = torch.frombuffer(buffer.memory, dtype=torch.uint8)
        assert host.is_pinned()
        device = torch.arange(host.numel(), device="cuda").to(torch.uint8)
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(host, device.cpu())
        del host
