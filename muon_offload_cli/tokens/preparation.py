"""Preparation of training tokens: files of text or examples, written once to Megatron's indexed format.

Runs in the launcher before any rank starts, and again on each rank, which finds the cache filled.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muon_offload_cli.config.locations import from_home
from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import Problem, UserError, wrong
from muon_offload_cli.tokens import token_cache
from muon_offload_cli.tokens.conversations import MAX_PROBLEMS
from muon_offload_cli.tokens.encoding import ByteEncoder, Encoder, make_encoder
from muon_offload_cli.tokens.indexed_pair import check_pair
from muon_offload_cli.tokens.pair_writer import PairWriter, Sequence
from muon_offload_cli.tokens.text_corpus import PIECE_BYTES, Corpus, find_corpus

_FORMAT_VERSION = 1
"""Part of every cache name; raise it when the same files would give other tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedTokens:
    """Tokens that are ready to be trained on.

    Attributes:
        prefix: Path without suffix of the ``.bin``/``.idx`` pair; None for mock data.
        vocab_size: Size of the vocabulary; None if the tokens do not tell (``indexed``).
        eod: Token that ends a document; None if the tokens do not tell.
        num_tokens: Tokens of the whole set; None for mock data.
        unigram_entropy: Entropy of the tokens' frequencies in nats a token: the loss of the best model
            that does not look at the context. None where it was not counted.
        examples: Documents are examples whose sequences have a mode: 1 for what the loss counts, 0 for what
            it does not.
    """

    prefix: Path | None
    vocab_size: int | None
    eod: int | None
    num_tokens: int | None
    unigram_entropy: float | None
    examples: bool = False


def prepare(data: DataConfig, tokenizer: Path | None = None) -> PreparedTokens:
    """Make the tokens of ``data.source`` ready, from the cache where it holds them.

    Every rank may call it at the same time: one writes, the others wait.

    Args:
        data: Source, paths, cache folder.
        tokenizer: Model folder with a tokenizer for ``chat``; None: bytes.

    Raises:
        UserError: Paths, prefix, tokenizer or cache folder cannot be used.
    """
    match data.source:
        case DataSource.mock | DataSource.script:
            return PreparedTokens(
                prefix=None,
                vocab_size=ByteEncoder.vocab_size,
                eod=ByteEncoder.eod,
                num_tokens=None,
                unigram_entropy=None,
            )
        case DataSource.indexed:
            return _prepare_indexed(data)
        case DataSource.stdlib | DataSource.text:
            return _prepare_files(data, ByteEncoder())
        case DataSource.chat:
            return _prepare_files(data, make_encoder(tokenizer))


def _prepare_indexed(data: DataConfig) -> PreparedTokens:
    if not data.prefix:
        raise wrong(
            "data.prefix is not set: data.source=indexed needs a .bin/.idx pair.",
            "data.prefix=/path/to/set, where set.bin and set.idx both exist",
            "data.prefix",
        )
    prefix = from_home(data.prefix).absolute()
    num_tokens = check_pair(prefix)
    return PreparedTokens(
        prefix=prefix, vocab_size=None, eod=None, num_tokens=num_tokens, unigram_entropy=None
    )


def _prepare_files(data: DataConfig, encoder: Encoder) -> PreparedTokens:
    corpus = find_corpus(data)
    dtype = np.uint16 if encoder.vocab_size <= np.iinfo(np.uint16).max + 1 else np.int32
    entry = token_cache.fetch(
        root=token_cache.cache_root(data),
        name=f"{corpus.name}-{fingerprint(corpus, encoder)}",
        expected_bytes=corpus.num_bytes * np.dtype(dtype).itemsize,
        write=lambda prefix: _write(corpus, encoder, dtype, prefix),
    )
    return PreparedTokens(
        prefix=entry.prefix,
        vocab_size=encoder.vocab_size,
        eod=encoder.eod,
        num_tokens=entry.statistics.num_tokens,
        unigram_entropy=entry.statistics.unigram_entropy,
        examples=data.source is DataSource.chat,
    )


def fingerprint(corpus: Corpus, encoder: Encoder) -> str:
    """Name a corpus by its files' paths, sizes and times, without reading them, and by its encoder."""
    identity = {
        "format": _FORMAT_VERSION,
        "python": platform.python_version() if corpus.name == "stdlib" else None,
        "jsonl_key": corpus.jsonl_key,
        "piece_bytes": PIECE_BYTES,
        "encoder": encoder.identity,
        # JSON has no form for the undecodable bytes of a path; `repr` does.
        "files": [[repr(str(file.path)), file.num_bytes, file.mtime_ns] for file in corpus.files],
    }
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]


def _write(
    corpus: Corpus, encoder: Encoder, dtype: type[np.uint16 | np.int32], prefix: Path
) -> token_cache.Statistics:
    """Write a corpus as a pair.

    Raises:
        UserError: The corpus cannot be read or holds no text.
        OSError: The pair cannot be written.
    """
    examples = corpus.name == DataSource.chat.name
    counts = np.zeros(encoder.vocab_size, dtype=np.int64)
    with PairWriter(prefix, dtype, modes=examples) as writer:
        for sequence in _encoded(corpus, encoder) if examples else _bytes(corpus):
            np.add.at(counts, sequence.tokens, 1)
            writer.add(sequence)
        if not counts.any():
            raise UserError(problems=[corpus.nothing()])
    return token_cache.Statistics(num_tokens=int(counts.sum()), unigram_entropy=unigram_entropy(counts))


def _bytes(corpus: Corpus) -> Iterator[Sequence]:
    """Yield one sequence a piece."""
    for piece in corpus.pieces():
        tokens = np.frombuffer(piece.data, dtype=np.uint8).astype(np.uint16)
        if piece.ends_document:
            tokens = np.append(tokens, np.uint16(ByteEncoder.eod))
        yield Sequence(tokens, piece.ends_document)


def _encoded(corpus: Corpus, encoder: Encoder) -> Iterator[Sequence]:
    """Yield one document an example, one sequence a span."""
    problems: list[Problem] = []
    for where, example in corpus.examples():
        try:
            spans = encoder.encode(example)
        except ValueError as error:
            problems.append(Problem(what=f"data.paths: {where}: {error}.", keys=("data.paths",)))
            if len(problems) == MAX_PROBLEMS:
                break
            continue
        for number, span in enumerate(spans, start=1):
            tokens = np.array(span.tokens, dtype=np.int64)
            yield Sequence(tokens, number == len(spans), int(span.counted))
    if problems:
        raise UserError(problems=problems)


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return ``-sum(p ln p)`` in nats for the frequencies `p` of non-negative `counts`."""
    present = counts[counts > 0]
    frequencies = present / present.sum()
    # Adding 0.0 turns the -0.0 of a single symbol into 0.0.
    return float(-(frequencies * np.log(frequencies)).sum()) + 0.0
