"""Writing a ``.bin``/``.idx`` pair in Megatron's indexed format.

Megatron's own builder needs torch, and this runs in the launcher too, which starts without it. The layout is
in `indexed_pair`; a mode for each sequence, where there are modes, follows as one i8 each (``multimodal`` in
``megatron/core/datasets/indexed_dataset.py``).
"""

from __future__ import annotations

from array import array
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from muon_offload_cli.tokens.indexed_pair import DTYPE_CODES, HEADER, MAGIC, bin_path, idx_path

Tokens = npt.NDArray[np.unsignedinteger | np.signedinteger]


class Sequence(NamedTuple):
    """Tokens in a row, a mode, and whether a document ends behind them."""

    tokens: Tokens
    ends_document: bool
    mode: int = 0


class PairWriter:
    """Appends sequences to ``prefix.bin`` and writes ``prefix.idx`` at the end of the context.

    An exception leaves a pair without its index, which nobody takes for a whole one.

    Args:
        prefix: Path without suffix.
        dtype: ``uint16`` or ``int32``.
        modes: Record a mode for each sequence.
    """

    def __init__(self, prefix: Path, dtype: type[np.uint16 | np.int32], *, modes: bool) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b") if modes else None
        self._stream = bin_path(prefix).open("wb")

    def add(self, sequence: Sequence) -> None:
        """Append a sequence."""
        self._stream.write(sequence.tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.append(len(sequence.tokens))
        if self._modes is not None:
            self._modes.append(sequence.mode)
        if sequence.ends_document:
            self._documents.append(len(self._lengths))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the data; write the index if all went well."""
        self._stream.close()
        if error is None:
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        code = DTYPE_CODES[self._dtype.name]
        with idx_path(self._prefix).open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(self._documents)))
            stream.write(lengths.tobytes())
            stream.write((ends - lengths.astype(np.int64) * self._dtype.itemsize).tobytes())
            stream.write(self._documents.tobytes())
            if self._modes is not None:
                stream.write(self._modes.tobytes())
