"""What a corpus holds, and what a person is told when it cannot be read."""

import os
from pathlib import Path

import pytest

from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import UserError
from muon_offload_cli.tokens import conversations, text_corpus
from muon_offload_cli.tokens.text_corpus import Piece, find_corpus


def text(*paths: Path, jsonl_key: str = "text") -> DataConfig:
    return DataConfig(source=DataSource.text, paths=[str(path) for path in paths], jsonl_key=jsonl_key)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_each_text_file_is_one_document_of_its_raw_bytes(tmp_path):
    first = write(tmp_path / "a.txt", b"\xff\x00\r\n")
    second = write(tmp_path / "b.txt", "é")
    assert list(find_corpus(text(first, second)).pieces()) == [
        Piece(b"\xff\x00\r\n", True),
        Piece("é".encode(), True),
    ]


@pytest.mark.parametrize("size", [3, 4, 5, 8, 9])
def test_a_long_document_is_cut_and_only_its_last_piece_ends_it(tmp_path, monkeypatch, size):
    monkeypatch.setattr(text_corpus, "PIECE_BYTES", 4)
    content = bytes(range(size))
    pieces = list(find_corpus(text(write(tmp_path / "a.txt", content))).pieces())
    assert b"".join(piece.data for piece in pieces) == content
    assert all(1 <= len(piece.data) <= 4 for piece in pieces)
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_each_jsonl_line_is_a_document_and_blank_lines_and_empty_texts_are_none(tmp_path):
    path = write(
        tmp_path / "a.jsonl", '{"text": "one"}\n\n{"text": ""}\n{"text": "z\\u00e9\\ud800", "id": 1}'
    )
    pieces = list(find_corpus(text(path)).pieces())
    assert pieces == [Piece(b"one", True), Piece("zé\ud800".encode("utf-8", "surrogatepass"), True)]


def test_jsonl_key_names_the_field(tmp_path):
    path = write(tmp_path / "a.json", '{"content": "x", "text": "y"}\n')
    assert list(find_corpus(text(path, jsonl_key="content")).pieces()) == [Piece(b"x", True)]


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("{oops", "line 2 is not JSON", "rename the file to .txt"),
        ("[1]", "line 2 is a list; one JSON object", '{"text": "..."}'),
        ('{"body": "x"}', "line 2 has no field 'text' (data.jsonl_key); it has: body", "data.jsonl_key=body"),
        ('{"text": 3}', "line 2: the field 'text' (data.jsonl_key) is a number", "data.jsonl_key="),
        ("[" * 100_000, "line 2 is nested too deeply", "rename the file to .txt"),
        ('"\udcff"', "line 2 is not UTF-8 text", "save the file as UTF-8"),
    ],
)
def test_a_bad_jsonl_line_is_told_with_file_and_line(tmp_path, line, what, fix):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(UserError) as caught:
        list(find_corpus(text(path)).pieces())
    (problem,) = caught.value.problems
    assert str(path) in problem.what
    assert what in problem.what
    assert fix in problem.fix
    assert problem.exit_code == 2


def test_all_bad_lines_of_a_file_are_told_up_to_a_limit(tmp_path):
    path = write(tmp_path / "a.jsonl", "bad\n" * 100)
    with pytest.raises(UserError) as caught:
        list(find_corpus(text(path)).pieces())
    *told, more = caught.value.problems
    assert len(told) == conversations.MAX_PROBLEMS
    assert "was not read beyond line 10" in more.what


def test_every_path_that_cannot_be_used_is_told_at_once(tmp_path):
    empty = write(tmp_path / "empty.txt", "")
    missing = tmp_path / "missing.txt"
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "inside.txt", "x")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fine = write(tmp_path / "fine.txt", "x")
    with pytest.raises(UserError) as caught:
        find_corpus(text(missing, fine, empty, folder, pipe))
    told = [problem.what for problem in caught.value.problems]
    assert told == [
        f"data.paths: {missing} cannot be opened: No such file or directory.",
        f"data.paths: {empty} is empty.",
        f"data.paths: {folder} is a directory; each path must be one text or jsonl file.",
        f"data.paths: {pipe} is not a regular file.",
    ]
    assert str(folder / "inside.txt") in caught.value.problems[2].fix
    assert all(problem.fix and problem.keys == ("data.paths",) for problem in caught.value.problems)


def test_no_path_at_all_is_told():
    with pytest.raises(UserError, match=r"data\.paths is empty"):
        find_corpus(text())


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_told(tmp_path):
    path = write(tmp_path / "a.txt", "x")
    path.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        find_corpus(text(path))


def test_a_file_that_vanishes_after_it_was_found_is_told(tmp_path):
    path = write(tmp_path / "a.txt", "x")
    corpus = find_corpus(text(path))
    path.unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read: No such file"):
        list(corpus.pieces())


def test_the_standard_library_is_a_sorted_corpus_without_tests_and_installed_packages():
    files = [file.path for file in find_corpus(DataConfig()).files]
    assert len(files) > 300
    assert Path(os.__file__) in files
    assert not any({"test", "tests", "site-packages", "__pycache__"} & set(path.parts) for path in files)
    assert files == [file.path for file in find_corpus(DataConfig()).files]
