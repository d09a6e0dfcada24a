"""Checks of a ``.bin``/``.idx`` pair in Megatron's indexed format, without loading it.

The layout of the index is that of ``megatron/core/datasets/indexed_dataset.py`` (``_IndexWriter``): a
magic of 9 bytes, version (u64), dtype code (u8), sequence count (u64), document count (u64), then lengths
(i32), byte offsets (i64) and document boundaries (i64). Megatron itself meets a bad pair with an
assertion on every rank, or, where the data is cut short, with an error in the middle of the run.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muon_offload_cli.errors import UserError, override, wrong

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes a token by dtype code (``DType`` of indexed_dataset.py)."""

DTYPE_CODES = {"uint16": 8, "int32": 4}
"""Codes of the dtypes that are written here."""


def bin_path(prefix: Path) -> Path:
    """Return the data file of a pair."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the index file of a pair."""
    return prefix.with_name(prefix.name + ".idx")


def check_pair(prefix: Path) -> int:
    """Check that a pair exists and that index and data agree in size; returns the number of its tokens.

    Args:
        prefix: Path without suffix, the value of ``data.prefix``.

    Raises:
        UserError: A file is missing, unreadable, not in this format, damaged or empty.
    """
    if prefix.suffix in (".bin", ".idx") and not idx_path(prefix).exists():
        raise wrong(
            f"data.prefix={prefix} names one file of the pair; the path without its suffix is expected.",
            override("data.prefix", prefix.with_suffix("")),
            "data.prefix",
        )
    try:
        index_bytes, data_bytes = idx_path(prefix).stat().st_size, bin_path(prefix).stat().st_size
        with idx_path(prefix).open("rb") as stream:
            header = stream.read(HEADER.size)
        bin_path(prefix).open("rb").close()
    except OSError as error:
        raise wrong(
            f"data.prefix={prefix}: {error.filename} cannot be opened: {error.strerror}.",
            "data.prefix=/path/to/set, where set.bin and set.idx both exist",
            "data.prefix",
        ) from error
    if len(header) < HEADER.size:
        raise _damaged(prefix, "the index is shorter than its header")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if magic != MAGIC or version != 1 or code not in _ITEM_BYTES:
        raise _damaged(prefix, "the index is not in Megatron's indexed format, version 1")
    # Compared in Python's integers before numpy is asked to map a size that a damaged header invented.
    expected = HEADER.size + num_sequences * 12 + num_boundaries * 8
    if index_bytes < expected:
        raise _damaged(prefix, f"the index has {index_bytes} bytes where its counts need {expected}")
    if num_sequences == 0:
        raise _damaged(prefix, "it holds no sequences")
    lengths = np.memmap(
        idx_path(prefix), dtype=np.dtype("<i4"), mode="r", offset=HEADER.size, shape=(num_sequences,)
    )
    num_tokens = int(lengths.sum(dtype=np.int64))
    needed = num_tokens * _ITEM_BYTES[code]
    if data_bytes != needed:
        raise _damaged(prefix, f"the data file has {data_bytes} bytes where the index needs {needed}")
    return num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The index of a pair with modes.

    Attributes:
        lengths: Tokens of each sequence.
        modes: Mode of each sequence.
        documents: First sequence of each document, and behind the last one their number.
    """

    lengths: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each document."""
        return np.add.reduceat(self.lengths, self.documents[:-1])

    def first_counted(self) -> npt.NDArray[np.int64]:
        """Return the place of each document's first token with a mode, counted from its start.

        A token at place 0 has none before it that could predict it, so 1 is the first that counts.
        """
        starts = np.concatenate(([0], np.cumsum(self.lengths)))[:-1]
        within = starts - np.repeat(starts[self.documents[:-1]], np.diff(self.documents))
        nowhere = np.iinfo(np.int64).max
        return np.minimum.reduceat(
            np.where(self.modes > 0, np.maximum(within, 1), nowhere), self.documents[:-1]
        )


def read_spans(prefix: Path) -> Spans:
    """Read the index of a pair with modes that was checked or written here."""
    raw = idx_path(prefix).read_bytes()
    *_, sequences, boundaries = HEADER.unpack_from(raw)

    def part(dtype: str, count: int, offset: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(raw, dtype=dtype, count=count, offset=offset).astype(np.int64)

    documents = HEADER.size + 12 * sequences
    return Spans(
        lengths=part("<i4", sequences, HEADER.size),
        documents=part("<i8", boundaries, documents),
        modes=part("i1", sequences, documents + 8 * boundaries),
    )


def _damaged(prefix: Path, reason: str) -> UserError:
    return wrong(
        f"data.prefix={prefix} is damaged: {reason}.",
        "write it again with Megatron's tools/preprocess_data.py, or data.source=text data.paths=[...]",
        "data.prefix",
    )
