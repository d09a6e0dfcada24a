"""Which checkpoints count as complete."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.checkpoints.keeping import make_room
from muon_offload_cli.checkpoints.listing import content_fault, interrupted_bytes, list_checkpoints, newest
from muon_offload_cli.checkpoints.names import SAVING, SEAL, step_folder, step_of
from muon_offload_cli.checkpoints.seal import Seal
from tests.checkpoints import forged


def test_a_seal_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = forged.save(tmp_path, 4)
    sealed = Seal.read(folder)
    assert sealed is not None
    assert (sealed.step, sealed.layout["ep"], sealed.engine) == (4, 2, "disk")
    assert sealed.nbytes == sum(path.stat().st_size for path in folder.iterdir() if path.name != SEAL)
    assert content_fault(folder, sealed) == ""


def test_steps_are_listed_in_order_and_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    for step in (10, 2):
        forged.save(tmp_path, step)
    forged.save_plain(tmp_path, 12)
    (tmp_path / "notes").mkdir()
    found = list_checkpoints(tmp_path)
    assert [(each.step, each.complete, each.seal is None) for each in found] == [
        (2, True, False),
        (10, True, False),
        (12, True, True),
    ]
    best = newest(found)
    assert best is not None
    assert best.step == 12


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_truncated_file_is_named_with_its_sizes(tmp_path: Path, name: str) -> None:
    folder = forged.save(tmp_path, 4)
    size = (folder / name).stat().st_size
    with (folder / name).open("r+b") as stream:
        stream.truncate(size - 1)
    (found,) = list_checkpoints(tmp_path)
    assert found.fault == f"{name} is truncated: {size - 1} of {size} bytes"


def test_a_sealed_checkpoint_keeps_its_name(tmp_path: Path) -> None:
    forged.save(tmp_path, 4).rename(step_folder(tmp_path, 9))
    (found,) = list_checkpoints(tmp_path)
    assert found.fault == "it was sealed as iter_0000004, and has been renamed"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (forged.save(tmp_path, 4) / "__0_0.distcp").unlink()
    (found,) = list_checkpoints(tmp_path)
    assert found.fault == "__0_0.distcp is missing"


@given(position=st.integers(0, len(forged.CONTENT) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_by_reading(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    folder = forged.save(tmp_path_factory.mktemp("flip"), 4)
    sealed = Seal.read(folder)
    assert sealed is not None
    data = bytearray(forged.CONTENT)
    data[position] ^= 1 << bit
    (folder / "__0_0.distcp").write_bytes(data)
    assert content_fault(folder, sealed).startswith("__0_0.distcp is damaged between bytes ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "its text is no JSON"),
        (b"{", "its text is no JSON"),
        (b"\xff\xfe\xff", "its text is no JSON"),
        (b"[" * 100_000, "its text is no JSON"),
        (b"9" * 5000, "its text is no JSON"),
        (b"[]", "not say all that a seal says"),
        (b'{"format": 1}', "not say all that a seal says"),
        (b'{"format": 99}', "it has format 99, this version reads up to 2"),
    ],
)
def test_an_unreadable_seal_is_a_fault_in_our_words(tmp_path: Path, text: bytes, told: str) -> None:
    folder = forged.save(tmp_path, 4)
    (folder / SEAL).write_bytes(text)
    (found,) = list_checkpoints(tmp_path)
    assert found.fault.startswith(f"{SEAL}: it ")
    assert found.fault.endswith(told)


@given(position=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_any_other_byte_in_a_seal_is_a_fault(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    folder = forged.save(tmp_path_factory.mktemp("seal"), 4)
    data = bytearray((folder / SEAL).read_bytes())
    position %= len(data)
    data[position] ^= byte
    (folder / SEAL).write_bytes(data)
    (found,) = list_checkpoints(folder.parent)
    assert found.complete == (byte == 0)


def test_a_seal_of_format_1_has_no_sum(tmp_path: Path) -> None:
    folder = forged.save(tmp_path, 4)
    data = json.loads((folder / SEAL).read_text()) | {"format": 1}
    del data["sum"]
    (folder / SEAL).write_text(json.dumps(data))
    (found,) = list_checkpoints(tmp_path)
    assert found.complete


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "metadata.json/x"])
def test_a_file_that_cannot_be_looked_at_is_a_fault(tmp_path: Path, name: str) -> None:
    folder = forged.save(tmp_path, 4)
    seal = Seal.read(folder)
    assert seal is not None
    replace(seal, files={name: seal.files["metadata.json"]}).write(folder)
    (found,) = list_checkpoints(tmp_path)
    assert f"{name!r} cannot be looked at: " in found.fault


@pytest.mark.parametrize(
    "value",
    [
        {"layout": [2]},
        {"layout": {"tp": "2"}},
        {"chunk_mb": "1"},
        {"model": 3},
        {"files": {"a": 3}},
        {"files": {"a": {"size": "1", "pieces": []}}},
        {"files": {"a": {"size": 1, "pieces": [[1, "x", 2]]}}},
    ],
)
def test_a_value_of_another_kind_makes_no_seal(tmp_path: Path, value: dict[str, object]) -> None:
    folder = forged.save(tmp_path, 4)
    (folder / SEAL).write_text(json.dumps(json.loads((folder / SEAL).read_text()) | value))
    (found,) = list_checkpoints(tmp_path)
    assert found.fault.endswith("not say all that a seal says")


def test_plain_megatron_counts_only_as_far_as_its_tracker_reaches(tmp_path: Path) -> None:
    forged.save_plain(tmp_path, 4)
    forged.write_files(step_folder(tmp_path, 6))
    (step_folder(tmp_path, 2)).mkdir()
    faults = {each.step: each.fault for each in list_checkpoints(tmp_path)}
    assert faults[4] == ""
    assert "does not reach this step" in faults[6]
    assert "metadata.json is missing" in faults[2]


def test_an_interrupted_save_is_told(tmp_path: Path) -> None:
    forged.save(tmp_path, 4)
    forged.write_files(step_folder(tmp_path / SAVING, 6))
    assert [(each.step, each.fault) for each in list_checkpoints(tmp_path)] == [
        (4, ""),
        (6, "its save was interrupted"),
    ]


def test_what_stands_in_a_checkpoints_place_and_is_no_folder_is_told(tmp_path: Path) -> None:
    forged.save(tmp_path, 4)
    step_folder(tmp_path, 6).touch()
    step_folder(tmp_path, 8).symlink_to(tmp_path / "gone")
    assert [(each.step, each.fault) for each in list_checkpoints(tmp_path)] == [
        (4, ""),
        (6, "it is no folder"),
        (8, "it is a link that leads to no folder"),
    ]
    # A run that comes to these steps puts its own there.
    for step in (6, 8):
        forged.save(tmp_path, step)
    assert [each.fault for each in list_checkpoints(tmp_path)] == ["", "", ""]


def test_an_interrupted_save_counts_with_what_it_wrote(tmp_path: Path) -> None:
    growing = step_folder(tmp_path / SAVING, 6)
    growing.mkdir(parents=True)
    with (growing / "__0_0.distcp").open("wb") as file:
        file.write(bytes(4096))
        file.truncate(2**30)
    (found,) = list_checkpoints(tmp_path)
    assert 4096 <= found.size < 2**20
    assert interrupted_bytes(tmp_path) == found.size
    # An interrupted deletion too: the next save removes it all.
    growing.rename(tmp_path / SAVING / "deleted_iter_0000006")
    assert interrupted_bytes(tmp_path) == found.size
    make_room(tmp_path)
    assert interrupted_bytes(tmp_path) == 0


def test_a_directory_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []


@given(st.integers(0, 10**9))
def test_folder_names_are_read_back(step: int) -> None:
    assert step_of(step_folder(Path("/c"), step)) == step


def test_listing_while_saves_end_and_old_checkpoints_go_is_no_fault(tmp_path: Path) -> None:
    saving, placed = tmp_path / SAVING, tmp_path / "iter_0000004"
    forged.save(tmp_path, 2)
    forged.save(tmp_path, 4)
    over = threading.Event()

    def move() -> None:
        while not over.is_set():
            saving.mkdir()
            placed.rename(saving / placed.name)
            (saving / placed.name).rename(placed)
            saving.rmdir()

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(500):
            assert 2 in [each.step for each in list_checkpoints(tmp_path) if each.complete]
    finally:
        over.set()
        mover.join()


def test_a_file_where_saves_grow_holds_none(tmp_path: Path) -> None:
    (tmp_path / SAVING).touch()
    assert list_checkpoints(tmp_path) == []
