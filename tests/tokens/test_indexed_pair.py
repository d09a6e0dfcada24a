"""A prepared pair is checked before Megatron meets it."""

import struct
from pathlib import Path

import numpy as np
import pytest

from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import UserError
from muon_offload_cli.tokens.preparation import prepare

HEADER_BYTES = 34


def write_pair(prefix: Path, lengths: list[int]) -> None:
    """Write a pair of uint16 tokens by the format's description, not by the code under test."""
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    index += np.array(lengths, dtype="<i4").tobytes()
    index += (np.cumsum([0, *lengths[:-1]]) * 2).astype("<i8").tobytes()
    index += np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(bytes(2 * sum(lengths)))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    path = tmp_path / "set"
    write_pair(path, [3, 4, 5])
    return path


def indexed(prefix: object) -> DataConfig:
    return DataConfig(source=DataSource.indexed, prefix=str(prefix))


def test_a_sound_pair_is_taken_as_it_is_and_its_vocabulary_is_not_known(prefix):
    prepared = prepare(indexed(prefix))
    assert prepared.prefix == prefix
    assert prepared.num_tokens == 12
    assert (prepared.vocab_size, prepared.eod, prepared.unigram_entropy) == (None, None, None)


def test_a_dot_in_the_prefix_is_part_of_the_name(tmp_path):
    write_pair(tmp_path / "a.b", [2])
    (tmp_path / "a.idx").rename(tmp_path / "v1.5.idx")
    (tmp_path / "a.bin").rename(tmp_path / "v1.5.bin")
    assert prepare(indexed(tmp_path / "v1.5")).num_tokens == 2


def patched(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda idx, _: patched(idx, 0, b"X"), "not in Megatron's indexed format"),
        (lambda idx, _: patched(idx, 9, b"\x02"), "not in Megatron's indexed format"),
        (lambda idx, _: patched(idx, 17, b"\x63"), "not in Megatron's indexed format"),
        (lambda idx, _: patched(idx, 18, b"\xff" * 8), "bytes where its counts need"),
        (lambda idx, _: patched(idx, HEADER_BYTES, b"\x07"), "bytes where the index needs"),
        (lambda idx, _: idx.write_bytes(idx.read_bytes()[:20]), "shorter than its header"),
        (lambda idx, _: idx.write_bytes(idx.read_bytes()[:-1]), "bytes where its counts need"),
        (lambda _, data: data.write_bytes(data.read_bytes()[:-1]), "bytes where the index needs"),
        (lambda idx, _: write_pair(idx.with_suffix(""), []), "no sequences"),
        (lambda idx, _: idx.unlink(), "set.idx cannot be opened"),
        (lambda _, data: data.unlink(), "set.bin cannot be opened"),
    ],
)
def test_a_damaged_pair_is_refused_with_the_reason(prefix, damage, reason):
    damage(prefix.with_suffix(".idx"), prefix.with_suffix(".bin"))
    with pytest.raises(UserError) as caught:
        prepare(indexed(prefix))
    (problem,) = caught.value.problems
    assert f"data.prefix={prefix}" in problem.what
    assert reason in problem.what
    assert problem.fix


def test_a_prefix_with_a_suffix_is_refused_with_the_right_one(prefix):
    with pytest.raises(UserError) as caught:
        prepare(indexed(f"{prefix}.bin"))
    assert caught.value.problems[0].fix == f"data.prefix={prefix}"


def test_a_missing_prefix_is_refused():
    with pytest.raises(UserError, match=r"data\.prefix is not set"):
        prepare(DataConfig(source=DataSource.indexed))
