"""Damage in a checkpoint's files is told by the file's name, whatever torch makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from muon_offload_cli.checkpoints.names import SEAL, step_folder
from muon_offload_cli.checkpoints.seal import FileSeal, Seal, hash_piece
from muon_offload_cli.errors import UserError
from muon_offload_cli.megatron.checkpoint_io import Incoming, damaged
from muon_offload_cli.megatron.substitute import Substitutions
from muon_offload_cli.storage.direct import DirectStore
from muon_offload_cli.storage.extent import Extent
from muon_offload_cli.storage.sources import Sources
from tests.checkpoints import forged
from tests.fakes.drive import directory_on_a_drive

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVED = {"small": torch.arange(100.0), "large": torch.arange(90_000.0).reshape(300, 300)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of torch's own writer, sealed in pieces smaller than a tensor's archive, as ours are."""
    folder = step_folder(forged.save(tmp_path_factory.mktemp("saved"), 2).parent, 4)
    checkpoint.save(SAVED, storage_writer=FileSystemWriter(folder), no_dist=True)
    files = {path.name: in_pieces(path.read_bytes()) for path in folder.iterdir()}
    forged.seal(folder, 4, files=files).write(folder)
    return folder


def in_pieces(data: bytes) -> FileSeal:
    pieces = [data[start : start + 500] for start in range(0, len(data), 500)]
    return FileSeal(size=len(data), pieces=tuple((len(piece), hash_piece(piece)) for piece in pieces))


@pytest.fixture(scope="module")
def sources() -> Iterator[Sources]:
    with Sources([]) as made:
        yield made


def load(
    folder: Path,
    sources: Sources,
    seal: Seal | None,
    state: dict[str, torch.Tensor] | None = None,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:
    state = state or {name: torch.zeros_like(tensor) for name, tensor in SAVED.items()}
    with Substitutions() as stack:
        Incoming(folder, seal, sources, settle).replace_in(stack)
        try:
            checkpoint.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        except checkpoint.CheckpointException as error:
            ((failure, _),) = error.failures.values()
            raise failure from None
    return state


def test_what_was_saved_is_loaded(folder: Path, sources: Sources) -> None:
    state = load(folder, sources, Seal.read(folder))
    assert all(torch.equal(state[name], tensor) for name, tensor in SAVED.items())


@pytest.mark.parametrize("stored", SAVED)
def test_what_belongs_into_no_store_is_loaded_before_the_stores_must_be_at_rest(
    folder: Path, tmp_path: Path, stored: str
) -> None:
    (other,) = SAVED.keys() - {stored}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with DirectStore(directory_on_a_drive(tmp_path) / "state", 2**20) as store, Sources([store]) as sources:
        place = store.view(Extent(4096, SAVED[stored].nbytes))
        state = {
            stored: torch.frombuffer(place, dtype=torch.float32).view_as(SAVED[stored]),
            other: torch.zeros_like(SAVED[other]),
        }
        load(
            folder,
            sources,
            Seal.read(folder),
            state,
            lambda: seen.append((state[stored].clone(), state[other].clone())),
        )
        assert all(torch.equal(state[name], tensor) for name, tensor in SAVED.items())

    ((store_then, other_then),) = seen
    assert not store_then.any()
    assert torch.equal(other_then, SAVED[other])


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**7), bit=st.integers(0, 7))
def test_any_flipped_bit_is_told_by_the_files_name(
    folder: Path, sources: Sources, name: str, position: int, bit: int
) -> None:
    whole = (folder / name).read_bytes()
    data = bytearray(whole)
    data[position % len(data)] ^= 1 << bit
    (folder / name).write_bytes(data)
    try:
        with pytest.raises(UserError) as raised:
            load(folder, sources, Seal.read(folder))
    finally:
        (folder / name).write_bytes(whole)
    (problem,) = raised.value.problems
    assert f"the checkpoint file {folder / name} is damaged between bytes" in problem.what
    assert problem.fix == f"resume={folder.parent / 'iter_0000002'}"


def test_damage_is_told_also_where_the_other_checkpoints_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "iter_0000004"
    (problem,) = damaged(folder, f"{folder}/x is gone").problems
    assert problem.what == f"the checkpoint file {folder}/x is gone."
    assert problem.fix == "resume=/path/of/another/checkpoint"


def test_zeros_in_a_file_without_a_seal_and_one_that_is_gone_are_told_by_name(
    folder: Path, sources: Sources, tmp_path: Path
) -> None:
    copy = tmp_path / "iter_0000004"
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != SEAL:
            (copy / path.name).write_bytes(path.read_bytes())
    file = copy / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match=f"{file} holds no tensor at byte"):
        load(copy, sources, None)
    file.unlink()
    with pytest.raises(UserError, match=rf"{file} cannot be read: ENOENT \(No such file"):
        load(copy, sources, None)
