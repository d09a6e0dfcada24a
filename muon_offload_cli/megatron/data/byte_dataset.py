"""Preparation of training tokens: text as bytes, written once to Megatron's indexed format.

Runs before and without a process group; Megatron is imported only where a dataset has to be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import wrong
from muon_offload_cli.megatron.data import token_cache
from muon_offload_cli.megatron.data.indexed_pair import bin_path, check_pair, idx_path
from muon_offload_cli.megatron.data.text_corpus import (
    END_OF_DOCUMENT,
    PIECE_BYTES,
    VOCAB_SIZE,
    Corpus,
    find_corpus,
)

_FORMAT_VERSION = 1
"""Part of every cache name; raise it when the same files would give other tokens."""

_TOKEN_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Tokens that are ready to be trained on.

    Attributes:
        prefix: Path without suffix of the ``.bin``/``.idx`` pair; None for mock data.
        vocab_size: Size of the vocabulary; None if the tokens do not tell (``indexed``).
        eod: Token that ends a document; None if the tokens do not tell.
        num_tokens: Tokens of the whole set; None for mock data.
        unigram_entropy: Entropy of the tokens' frequencies in nats a token: the loss of the best model
            that does not look at the context. None where it was not counted.
    """

    prefix: Path | None
    vocab_size: int | None
    eod: int | None
    num_tokens: int | None
    unigram_entropy: float | None


def prepare(data: DataConfig) -> Prepared:
    """Make the tokens of ``data.source`` ready, from the cache where it holds them.

    Every rank may call it at the same time: one writes, the others wait.

    Raises:
        UserError: Paths, prefix or cache folder cannot be used.
    """
    match data.source:
        case DataSource.mock | DataSource.script:
            return Prepared(
                prefix=None, vocab_size=VOCAB_SIZE, eod=END_OF_DOCUMENT, num_tokens=None, unigram_entropy=None
            )
        case DataSource.indexed:
            return _prepare_indexed(data)
        case DataSource.stdlib | DataSource.text:
            return _prepare_bytes(data)


def _prepare_indexed(data: DataConfig) -> Prepared:
    if not data.prefix:
        raise wrong(
            "data.prefix is not set: data.source=indexed needs a .bin/.idx pair.",
            "data.prefix=/path/to/set, where set.bin and set.idx both exist",
            "data.prefix",
        )
    prefix = Path(data.prefix).expanduser().absolute()
    info = check_pair(prefix)
    return Prepared(
        prefix=prefix, vocab_size=None, eod=None, num_tokens=info.num_tokens, unigram_entropy=None
    )


def _prepare_bytes(data: DataConfig) -> Prepared:
    corpus = find_corpus(data)
    entry = token_cache.fetch(
        root=token_cache.cache_root(data),
        name=f"{corpus.name}-{fingerprint(corpus)}",
        expected_bytes=corpus.num_bytes * _TOKEN_BYTES,
        write=lambda prefix: write_pair(corpus, prefix),
    )
    return Prepared(
        prefix=entry.prefix,
        vocab_size=VOCAB_SIZE,
        eod=END_OF_DOCUMENT,
        num_tokens=entry.statistics.num_tokens,
        unigram_entropy=entry.statistics.unigram_entropy,
    )


def fingerprint(corpus: Corpus) -> str:
    """Name a corpus by its files' paths, sizes and times, without reading them."""
    identity = {
        "format": _FORMAT_VERSION,
        "python": platform.python_version() if corpus.name == "stdlib" else None,
        "jsonl_key": corpus.jsonl_key,
        "piece_bytes": PIECE_BYTES,
        # JSON has no form for the undecodable bytes of a path; `repr` does.
        "files": [[repr(str(file.path)), file.num_bytes, file.mtime_ns] for file in corpus.files],
    }
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]


def write_pair(corpus: Corpus, prefix: Path) -> token_cache.Statistics:
    """Write a corpus as ``prefix.bin`` and ``prefix.idx``, one sequence a piece.

    Raises:
        UserError: The corpus cannot be read or holds no text.
        OSError: The pair cannot be written.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=np.uint16)
    try:
        for piece in corpus.pieces():
            tokens = np.frombuffer(piece.data, dtype=np.uint8).astype(np.uint16)
            if piece.ends_document:
                tokens = np.append(tokens, np.uint16(END_OF_DOCUMENT))
            counts += np.bincount(tokens, minlength=VOCAB_SIZE)
            builder.add_item(torch.from_numpy(tokens))
            if piece.ends_document:
                builder.end_document()
        if not counts.any():
            raise wrong(
                f"data.paths: no text in {', '.join(str(file.path) for file in corpus.files[:3])}.",
                "data.paths=[/path/to/file.txt] with a file that holds text",
                "data.paths",
            )
        builder.finalize(str(idx_path(prefix)))
    finally:
        # `finalize` closes the data file, but only where it is reached; closing twice does nothing.
        with contextlib.suppress(OSError):
            builder.data_file.close()
    return token_cache.Statistics(num_tokens=int(counts.sum()), unigram_entropy=unigram_entropy(counts))


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return ``-sum(p ln p)`` in nats for the frequencies `p` of non-negative `counts`."""
    present = counts[counts > 0]
    frequencies = present / present.sum()
    # Adding 0.0 turns the -0.0 of a single symbol into 0.0.
    return float(-(frequencies * np.log(frequencies)).sum()) + 0.0
