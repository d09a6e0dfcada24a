"""Documents of a text corpus, read as bytes.

A corpus is a list of files. It is found first (every file checked, nothing read) and read later, so that
a person learns of every bad path at once and before a cache is touched. This module knows neither
Megatron nor torch.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from muon_offload_cli.config.locations import from_home
from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import Problem, UserError, command, override, wrong
from muon_offload_cli.tokens.conversations import Example, json_object, kind_of, parse_example, read_lines
from muon_offload_cli.units import MIB

END_OF_DOCUMENT = 256
"""Token that ends a document; 0 to 255 are the bytes themselves."""

PIECE_BYTES = 16 * MIB
"""Longest piece that is held in memory; a longer document becomes several sequences."""

_JSONL_SUFFIXES = (".jsonl", ".json")

# Tests, installed packages and build results are absent from some distributions' interpreters, or differ
# between two installations of one version.
_STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Piece(NamedTuple):
    """Bytes of a document, in order; `ends_document` is set on its last piece."""

    data: bytes
    ends_document: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of a corpus as it was found: absolute path, size in bytes, modification time in ns."""

    path: Path
    num_bytes: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        """Whether each line is a JSON value."""
        return self.path.suffix.lower() in _JSONL_SUFFIXES

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        """Open it; an error while it is open is the user's to hear.

        Raises:
            UserError: It cannot be read.
        """
        try:
            with self.path.open("rb") as stream:
                yield stream
        except OSError as error:
            raise wrong(
                f"data.paths: {self.path} cannot be read: {error.strerror}.",
                command("chmod", "u+r", self.path),
                "data.paths",
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Files to read, in reading order.

    Attributes:
        name: Short name for people and file names.
        files: Every file; all exist, are regular, readable and not empty.
        jsonl_key: Field of a jsonl line that holds its text.
    """

    name: str
    files: tuple[SourceFile, ...]
    jsonl_key: str

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes; an upper bound of the text's size."""
        return sum(file.num_bytes for file in self.files)

    def pieces(self) -> Iterator[Piece]:
        """Yield all documents, cut into pieces of at most `PIECE_BYTES` (jsonl lines are not cut).

        Raises:
            UserError: A file cannot be read any more, or jsonl lines of a file are wrong; all bad lines
                of that file are told, `MAX_PROBLEMS` at most.
        """
        for file in self.files:
            with file.reading() as stream:
                if file.is_jsonl:
                    yield from _jsonl_pieces(stream, file.path, self.jsonl_key)
                else:
                    yield from _text_pieces(stream)

    def examples(self) -> Iterator[tuple[str, Example]]:
        """Yield the place and the content of every line of all files, each an example to learn from.

        Raises:
            UserError: See `pieces`.
        """
        for file in self.files:
            with file.reading() as stream:
                for number, example in read_lines(stream, file.path, parse_example):
                    yield f"{file.path} line {number}", example

    def look(self, limit_bytes: int, see: Callable[[Any], object] = bool) -> list[Problem]:
        """Return what is wrong with the lines in the first `limit_bytes` of each file that has lines.

        Args:
            limit_bytes: How far to look.
            see: Is given the content of each line that is right.
        """
        problems: list[Problem] = []
        silent = True
        for file in self.files:
            parse: Callable[[bytes, str], object]
            if self.name == DataSource.chat.name:
                parse = parse_example
            elif file.is_jsonl:
                parse = partial(_text_of, key=self.jsonl_key)
            else:
                silent = False
                continue
            silent = silent and file.num_bytes <= limit_bytes
            try:
                with file.reading() as stream:
                    for _, content in read_lines(stream, file.path, parse, limit_bytes=limit_bytes):
                        silent = silent and not content
                        see(content)
            except UserError as error:
                problems += error.problems
        return [self.nothing()] if silent and not problems else problems

    def nothing(self) -> Problem:
        """Return the problem of a corpus whose files hold nothing to learn from."""
        thing = "example" if self.name == DataSource.chat.name else "text"
        return Problem(
            what=f"data.paths: no {thing} in {', '.join(str(file.path) for file in self.files[:3])}.",
            fix=f"data.paths=[/path/to/file] with a file that holds {'an ' * (thing == 'example')}{thing}",
            keys=("data.paths",),
        )


def find_corpus(data: DataConfig) -> Corpus:
    """Find the files of ``data.source`` ``stdlib``, ``text`` or ``chat``.

    Raises:
        UserError: No path is given, or some are missing, empty, unreadable or not regular files.
    """
    if data.source is DataSource.stdlib:
        return Corpus(name="stdlib", files=_stdlib_files(), jsonl_key=data.jsonl_key)
    if not data.paths:
        raise wrong(
            f"data.paths is empty: data.source={data.source.name} needs at least one file.",
            "data.paths=[/path/to/file]",
            "data.paths",
        )
    corpus, problems = usable_files(data)
    if problems:
        raise UserError(problems=problems)
    return corpus


def usable_files(data: DataConfig) -> tuple[Corpus, list[Problem]]:
    """Return the files of ``data.paths`` that can be read, and what is wrong with the others."""
    files: list[SourceFile] = []
    problems: list[Problem] = []
    for text in data.paths:
        # `absolute`, not `resolve`: the suffix that a person sees decides how the file is read.
        path = from_home(text).absolute()
        problem = _problem_of(path)
        if problem is None:
            found = path.stat()
            files.append(SourceFile(path=path, num_bytes=found.st_size, mtime_ns=found.st_mtime_ns))
        else:
            problems.append(problem)
    return Corpus(name=data.source.name, files=tuple(files), jsonl_key=data.jsonl_key), problems


def _problem_of(path: Path) -> Problem | None:
    keys = ("data.paths",)
    try:
        found = path.stat()
    except OSError as error:
        return Problem(
            what=f"data.paths: {path} cannot be opened: {error.strerror}.",
            fix="data.paths=[/path/to/file.txt] with a file that exists",
            keys=keys,
        )
    if stat.S_ISDIR(found.st_mode):
        return Problem(
            what=f"data.paths: {path} is a directory; each path must be one text or jsonl file.",
            fix=override("data.paths", _files_of(path)),
            keys=keys,
        )
    if not stat.S_ISREG(found.st_mode):
        return Problem(
            what=f"data.paths: {path} is not a regular file.",
            fix="copy its contents to a file and name that",
            keys=keys,
        )
    if found.st_size == 0:
        return Problem(
            what=f"data.paths: {path} is empty.",
            fix="name a file that holds text, or leave it out",
            keys=keys,
        )
    if not os.access(path, os.R_OK):
        return Problem(
            what=f"data.paths: {path} cannot be read: Permission denied.",
            fix=command("chmod", "u+r", path),
            keys=keys,
        )
    return None


def _files_of(directory: Path) -> list[str]:
    """Name some files of a directory, for the fix of someone who named the directory."""
    try:
        names = sorted(str(entry) for entry in directory.iterdir() if entry.is_file())
    except OSError:
        names = []
    return names[:3] or [f"{directory}/file.txt"]


def _stdlib_files() -> tuple[SourceFile, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, names, entries in os.walk(root):
        names[:] = sorted(n for n in names if n not in _STDLIB_SKIPPED and not n.startswith("config-"))
        for entry in sorted(entries):
            # _sysconfigdata holds the compiler flags and paths of one build.
            if not entry.endswith(".py") or entry.startswith("_sysconfigdata"):
                continue
            path = Path(folder, entry)
            found = path.stat()
            if found.st_size > 0 and stat.S_ISREG(found.st_mode):
                files.append(SourceFile(path=path, num_bytes=found.st_size, mtime_ns=found.st_mtime_ns))
    if not files:
        raise wrong(
            f"data.source=stdlib: {sys.executable} has no standard library sources in {root}.",
            "data.source=text data.paths=[/path/to/file.txt]",
            "data.source",
        )
    return tuple(files)


def _text_pieces(stream: BinaryIO) -> Iterator[Piece]:
    # One block is read ahead so that the last piece, and no extra empty one, ends the document.
    block = stream.read(PIECE_BYTES)
    while block:
        following = stream.read(PIECE_BYTES)
        yield Piece(block, not following)
        block = following


def _jsonl_pieces(stream: BinaryIO, path: Path, key: str) -> Iterator[Piece]:
    for _, text in read_lines(stream, path, partial(_text_of, key=key)):
        if text:
            yield Piece(text.encode("utf-8", "surrogatepass"), True)


def _text_of(line: bytes, where: str, key: str) -> str | Problem:
    keys = ("data.paths", "data.jsonl_key")
    record = json_object(
        line,
        where,
        f'write the line as {{"{key}": "..."}}, or rename the file to .txt to read it as plain text',
    )
    if isinstance(record, Problem):
        return record
    if key not in record:
        strings = [name for name, value in record.items() if isinstance(value, str)]
        return Problem(
            what=f"data.paths: {where} has no field {key!r} (data.jsonl_key); "
            f"it has: {', '.join(record) or 'none'}.",
            fix=override("data.jsonl_key", strings[0]) if strings else f"add the field {key!r} to the line",
            keys=keys,
        )
    text = record[key]
    if not isinstance(text, str):
        return Problem(
            what=f"data.paths: {where}: the field {key!r} (data.jsonl_key) is {kind_of(text)}, not a string.",
            fix="data.jsonl_key=<the field that holds the text>",
            keys=keys,
        )
    return text
