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

from muon_offload_cli.errors import UserError, wrong

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes a token by dtype code (``DType`` of indexed_dataset.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairInfo:
    """What the index says: sequences, documents, tokens, and bytes a token."""

    num_sequences: int
    num_documents: int
    num_tokens: int
    token_bytes: int


def bin_path(prefix: Path) -> Path:
    """Return the data file of a pair."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the index file of a pair."""
    return prefix.with_name(prefix.name + ".idx")


def check_pair(prefix: Path) -> PairInfo:
    """Check that a pair exists and that index and data agree in size.

    Args:
        prefix: Path without suffix, the value of ``data.prefix``.

    Raises:
        UserError: A file is missing, unreadable, not in this format, damaged or empty.
    """
    if prefix.suffix in (".bin", ".idx") and not idx_path(prefix).exists():
        raise wrong(
            f"data.prefix={prefix} names one file of the pair; the path without its suffix is expected.",
            f"data.prefix={prefix.with_suffix('')}",
            "data.prefix",
        )
    try:
        index_bytes, data_bytes = idx_path(prefix).stat().st_size, bin_path(prefix).stat().st_size
        with idx_path(prefix).open("rb") as stream:
            header = stream.read(_HEADER.size)
        bin_path(prefix).open("rb").close()
    except OSError as error:
        raise wrong(
            f"data.prefix={prefix}: {error.filename} cannot be opened: {error.strerror}.",
            "data.prefix=/path/to/set, where set.bin and set.idx both exist",
            "data.prefix",
        ) from error
    if len(header) < _HEADER.size:
        raise _damaged(prefix, "the index is shorter than its header")
    magic, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _ITEM_BYTES:
        raise _damaged(prefix, "the index is not in Megatron's indexed format, version 1")
    # Compared in Python's integers before numpy is asked to map a size that a damaged header invented.
    expected = _HEADER.size + num_sequences * 12 + num_boundaries * 8
    if index_bytes < expected:
        raise _damaged(prefix, f"the index has {index_bytes} bytes where its counts need {expected}")
    if num_sequences == 0:
        raise _damaged(prefix, "it holds no sequences")
    lengths = np.memmap(
        idx_path(prefix), dtype=np.dtype("<i4"), mode="r", offset=_HEADER.size, shape=(num_sequences,)
    )
    num_tokens = int(lengths.sum(dtype=np.int64))
    needed = num_tokens * _ITEM_BYTES[code]
    if data_bytes != needed:
        raise _damaged(prefix, f"the data file has {data_bytes} bytes where the index needs {needed}")
    return PairInfo(
        num_sequences=num_sequences,
        num_documents=num_boundaries - 1,
        num_tokens=num_tokens,
        token_bytes=_ITEM_BYTES[code],
    )


def _damaged(prefix: Path, reason: str) -> UserError:
    return wrong(
        f"data.prefix={prefix} is damaged: {reason}.",
        "write it again with Megatron's tools/preprocess_data.py, or data.source=text data.paths=[...]",
        "data.prefix",
    )
