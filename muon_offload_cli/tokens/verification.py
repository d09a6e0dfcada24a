"""Finding faults of the training data while nothing is running yet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from muon_offload_cli.config.locations import from_home
from muon_offload_cli.config.rules.topology import length_step
from muon_offload_cli.config.schema import Config, DataSource
from muon_offload_cli.config.vocabulary import tokenizer_folder, vocabulary_size
from muon_offload_cli.errors import Level, Problem, UserError, wrong
from muon_offload_cli.tokens.conversations import Example
from muon_offload_cli.tokens.encoding import ByteEncoder
from muon_offload_cli.tokens.indexed_pair import check_pair, read_spans
from muon_offload_cli.tokens.preparation import prepare
from muon_offload_cli.tokens.text_corpus import usable_files
from muon_offload_cli.units import MIB, round_up

type Lengths = npt.NDArray[np.int64]

LOOKED_AT_BYTES = 16 * MIB
"""Of each file with lines, by a check that starts nothing: a fifth of a second."""


def look_at_data(config: Config) -> tuple[Problem, ...]:
    """Return what is wrong with the files of the config's data source; writes nothing.

    Of each jsonl file it reads the first `LOOKED_AT_BYTES`; the rest is read when the tokens are written.
    """
    data = config.data
    try:
        match data.source:
            case DataSource.text | DataSource.chat:
                corpus, problems = usable_files(data)
                lengths = _Lengths(config.train.sequence_length)
                if corpus.files:
                    see = lengths.see if data.source is DataSource.chat else bool
                    problems += corpus.look(LOOKED_AT_BYTES, see)
                # A model's tokenizer is too slow to load for a look, and a part says nothing of the rest.
                whole = all(file.num_bytes <= LOOKED_AT_BYTES for file in corpus.files)
                if lengths.firsts and whole and not problems and tokenizer_folder(config) is None:
                    problems += _nothing_left(config, np.array(lengths.firsts), np.array(lengths.totals))
                return tuple(problems)
            case DataSource.indexed:
                if data.prefix:
                    check_pair(from_home(data.prefix).absolute())
            case DataSource.stdlib | DataSource.mock | DataSource.script:
                pass
    except UserError as error:
        return tuple(error.problems)
    return ()


class _Lengths:
    """Where responses begin and end, as bytes, until one begins within the sequence length."""

    def __init__(self, sequence_length: int) -> None:
        self.firsts: list[int] = []
        self.totals: list[int] = []
        self._most = sequence_length

    def see(self, example: Example) -> None:
        """Note an example's first counted token, as `Spans.first_counted` has it, and its length."""
        if self.firsts and self.firsts[-1] <= self._most:
            return
        spans = ByteEncoder().encode(example)
        self.firsts.append(1 if spans[0].counted else len(spans[0].tokens))
        self.totals.append(sum(len(span.tokens) for span in spans))


def write_tokens(config: Config) -> list[Problem]:
    """Fill the cache with the tokens of a run that is about to start, unless it holds them.

    Returns:
        Notes on examples that the sequence length cuts.

    Raises:
        UserError: Files, tokenizer or cache cannot be used, or no example fits the run.
    """
    prepared = prepare(config.data, tokenizer_folder(config))
    if not prepared.examples or prepared.prefix is None:
        return []
    vocabulary = vocabulary_size(config)
    if prepared.vocab_size is not None and prepared.vocab_size > vocabulary:
        raise wrong(
            f"model.vocab_size={vocabulary} is less than the tokenizer's {prepared.vocab_size} tokens.",
            f"model.vocab_size={prepared.vocab_size}",
            "model.vocab_size",
        )
    return _lengths(config, prepared.prefix)


def shortest_sequence(config: Config) -> int:
    """Return the length from which on some example's response is learnt, as bytes; 0 without examples.

    A rehearsal's tokens are bytes: its small model has no tokenizer.

    Raises:
        UserError: Files or cache cannot be used.
    """
    prefix = prepare(config.data).prefix if config.data.source is DataSource.chat else None
    return 0 if prefix is None else int(read_spans(prefix).first_counted().min())


def _nothing_left(config: Config, firsts: Lengths, totals: Lengths) -> list[Problem]:
    """Return the problem of examples of which not one begins its response within the sequence length."""
    sequence_length, key = config.train.sequence_length, "train.sequence_length"
    if firsts.min() <= sequence_length:
        return []
    what = f"{key}={sequence_length}: every prompt is longer than that, so that no response is left to learn"
    what += " from."
    return [Problem(what=what, fix=_enough(config, totals), keys=(key,))]


def _enough(config: Config, totals: Lengths) -> str:
    # A sequence is one token longer than its labels, which are one token ahead.
    return f"train.sequence_length={round_up(int(totals.max()) - 1, length_step(config.parallel))}"


def _lengths(config: Config, prefix: Path) -> list[Problem]:
    sequence_length = config.train.sequence_length
    spans = read_spans(prefix)
    firsts, totals = spans.first_counted(), spans.document_lengths()
    if refused := _nothing_left(config, firsts, totals):
        raise UserError(problems=refused)
    silent = int(np.count_nonzero(firsts > sequence_length))
    cut = int(np.count_nonzero(totals > sequence_length + 1)) - silent
    keys = ("train.sequence_length",)
    notes = []
    if silent:
        notes.append(
            f"train.sequence_length={sequence_length}: {silent} of {len(totals)} examples have a longer "
            "prompt and are left out."
        )
    if cut:
        notes.append(
            f"train.sequence_length={sequence_length}: {cut} of {len(totals)} examples lose the end of their "
            "response."
        )
    fix = f"{_enough(config, totals)} keeps every example whole"
    return [Problem(what=note, fix=fix, keys=keys, level=Level.NOTE) for note in notes]
