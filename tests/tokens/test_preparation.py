"""Byte datasets: Megatron reads what was written, and the cache is used only while it is sound."""

import errno
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import UserError
from muon_offload_cli.tokens import text_corpus
from muon_offload_cli.tokens.pair_writer import PairWriter
from muon_offload_cli.tokens.preparation import PreparedTokens, prepare, unigram_entropy
from tests.fakes.fake_torchrun import HANG_S


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_bytes(b"hello")
    (tmp_path / "b.txt").write_bytes(bytes(range(256)))
    return DataConfig(
        source=DataSource.text,
        paths=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")],
        cache_directory=str(tmp_path / "cache"),
    )


def entry_of(prepared: PreparedTokens) -> Path:
    assert prepared.prefix is not None
    return prepared.prefix.parent


def identity(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_megatron_reads_back_the_bytes_and_the_ends_of_documents(data):
    prepared = prepare(data)
    dataset = IndexedDataset(str(prepared.prefix))
    assert dataset[0].tolist() == [*b"hello", 256]
    assert dataset[1].tolist() == [*range(256), 256]
    assert dataset.document_indices.tolist() == [0, 1, 2]
    assert dataset[0].dtype == np.uint16
    assert (prepared.vocab_size, prepared.eod, prepared.num_tokens) == (257, 256, 6 + 257)


def test_a_long_document_becomes_several_sequences_of_one_document(data, monkeypatch):
    monkeypatch.setattr(text_corpus, "PIECE_BYTES", 100)
    dataset = IndexedDataset(str(prepare(data).prefix))
    assert dataset.sequence_lengths.tolist() == [6, 100, 100, 57]
    assert dataset.document_indices.tolist() == [0, 1, 4]


def test_unigram_entropy_is_that_of_the_tokens(data, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"aab")
    data.paths = data.paths[:1]
    expected = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert prepare(data).unigram_entropy == pytest.approx(expected)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300).filter(any))
def test_unigram_entropy_is_at_least_zero_and_at_most_that_of_equal_frequencies(counts):
    present = sum(count > 0 for count in counts)
    entropy = unigram_entropy(np.array(counts, dtype=np.int64))
    assert -1e-9 <= entropy <= math.log(present) + 1e-9


def test_a_second_call_takes_the_cache_as_it_is(data):
    first = prepare(data)
    before = identity(entry_of(first))
    assert prepare(data) == first
    assert identity(entry_of(first)) == before


def test_only_the_owner_can_look_into_the_cache(data):
    folder = entry_of(prepare(data))
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("change", ["content", "time", "key", "order"])
def test_changed_sources_are_written_anew(data, tmp_path, change):
    first = prepare(data)
    if change == "content":
        (tmp_path / "a.txt").write_bytes(b"other text")
    elif change == "time":
        os.utime(tmp_path / "a.txt", ns=(1, 1))
    elif change == "key":
        data.jsonl_key = "body"
    else:
        data.paths.reverse()
    assert prepare(data).prefix != first.prefix


def truncate(name: str) -> Callable[[Path], Any]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 2)


def flip(name: str) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        path = folder / name
        before = path.stat()
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return damage


def remove(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def record(content: str | bytes) -> Callable[[Path], Any]:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / "record.json").write_bytes(raw)


def without(key: str) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        path = folder / "record.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))

    return damage


def replaced_by_a_file(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("not a folder")


class Bomb:
    """Creates a file if it is ever unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(os.environ["BOMB_PATH"]),)


@pytest.mark.parametrize(
    "damage",
    [
        truncate("tokens.bin"),
        truncate("tokens.idx"),
        flip("tokens.bin"),
        flip("tokens.idx"),
        remove("tokens.bin"),
        remove("tokens.idx"),
        remove("record.json"),
        record(""),
        record("[]"),
        record("{}"),
        record("[" * 100_000),
        record(b"\xff\xfe"),
        without("num_tokens"),
        without("unigram_entropy"),
        without("files"),
        replaced_by_a_file,
    ],
)
def test_a_damaged_cache_is_written_again_and_not_trusted(data, damage):
    first = prepare(data)
    folder = entry_of(first)
    good = contents(folder)
    damage(folder)
    assert prepare(data) == first
    assert contents(folder) == good


def test_nothing_in_the_cache_is_unpickled(data, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB_PATH", str(tmp_path / "went-off"))
    folder = entry_of(prepare(data))
    for path in folder.iterdir():
        path.write_bytes(pickle.dumps(Bomb()))
    prepare(data)
    assert not (tmp_path / "went-off").exists()


def test_what_a_killed_run_left_is_cleared_away(data):
    folder = entry_of(prepare(data))
    leftover = folder.with_name(folder.name + ".tmp")
    folder.rename(leftover)
    prepare(data)
    assert folder.is_dir()
    assert not leftover.exists()


def test_processes_that_prepare_at_the_same_time_write_once(data):
    program = (
        "import sys, json\n"
        "from muon_offload_cli.config.schema import DataConfig, DataSource\n"
        "from muon_offload_cli.tokens.preparation import prepare\n"
        "paths, cache = json.loads(sys.argv[1])\n"
        "data = DataConfig(source=DataSource.text, paths=paths, cache_directory=cache)\n"
        "sys.stdin.read(1)\n"
        "prepared = prepare(data)\n"
        "print(prepared.prefix, prepared.prefix.with_suffix('.bin').stat().st_ino, prepared.num_tokens)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, json.dumps([data.paths, data.cache_directory])]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("g")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 0
        outputs.append(output)
    assert len(set(outputs)) == 1
    prefix, inode, num_tokens = outputs[0].split()
    assert Path(prefix).with_suffix(".bin").stat().st_ino == int(inode)
    assert num_tokens == "263"


@pytest.mark.parametrize(
    ("number", "exit_code", "told"), [(errno.ENOSPC, 3, "full"), (errno.EIO, 3, "Input")]
)
def test_a_write_that_fails_leaves_nothing_half_written(data, monkeypatch, number, exit_code, told):
    def fail(self: Any, sequence: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(PairWriter, "add", fail)
    with pytest.raises(UserError) as caught:
        prepare(data)
    (problem,) = caught.value.problems
    assert problem.exit_code == exit_code
    assert told in problem.what
    assert data.cache_directory in problem.what
    assert "data.cache_directory=" in problem.fix
    assert [path.suffix for path in Path(data.cache_directory).iterdir()] == [".lock"]


def test_bad_text_leaves_nothing_half_written(data, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\nbad\n')
    data.paths.append(str(bad))
    with pytest.raises(UserError, match=r"bad\.jsonl line 2 is not JSON"):
        prepare(data)
    assert [path.suffix for path in Path(data.cache_directory).iterdir()] == [".lock"]


def test_a_corpus_without_any_text_is_refused(data, tmp_path):
    (tmp_path / "blank.jsonl").write_text('\n{"text": ""}\n')
    data.paths = [str(tmp_path / "blank.jsonl")]
    with pytest.raises(UserError, match="no text in"):
        prepare(data)


def test_a_cache_that_cannot_be_written_is_told(data, tmp_path):
    data.cache_directory = str(tmp_path / "a.txt" / "cache")
    with pytest.raises(UserError) as caught:
        prepare(data)
    assert caught.value.problems[0].what.startswith(f"data.cache_directory={data.cache_directory} cannot be")
    assert caught.value.problems[0].fix == "data.cache_directory=/path/you/can/write"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache_still_serves_what_it_holds(data):
    first = prepare(data)
    root = entry_of(first).parent
    root.chmod(0o500)
    try:
        assert prepare(data) == first
        data.jsonl_key = "body"
        with pytest.raises(UserError, match="Permission denied"):
            prepare(data)
    finally:
        root.chmod(0o700)


def test_a_relative_cache_directory_is_refused(data):
    data.cache_directory = "cache"
    with pytest.raises(UserError, match="not an absolute path"):
        prepare(data)


@pytest.mark.parametrize(
    ("xdg", "expected"), [("{tmp}/xdg", "xdg/muon-offload"), ("relative", "home/.cache/muon-offload")]
)
def test_the_cache_follows_the_user_s_cache_folder(data, tmp_path, monkeypatch, xdg, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", xdg.format(tmp=tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data.cache_directory = None
    assert entry_of(prepare(data)).parent == tmp_path / expected


def test_mock_data_needs_nothing():
    prepared = prepare(DataConfig(source=DataSource.mock, cache_directory="/dev/null/nowhere"))
    assert prepared.prefix is None
    assert (prepared.vocab_size, prepared.eod) == (257, 256)
