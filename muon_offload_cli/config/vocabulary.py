"""How many tokens a model knows; read by the flags of a run and by the planner alike."""

from __future__ import annotations

from pathlib import Path

from muon_offload_cli.config.schema import Config, DataSource

BYTE_VOCABULARY = 257
"""Token ids of text data: a byte each, and the end of a document, which the null tokenizer puts last."""

MOCK_VOCABULARY = 32000
"""Vocabulary of ``data=mock`` where the model names none; any size will do."""

BYTE_SOURCES = (DataSource.stdlib, DataSource.text, DataSource.chat)
"""Sources whose tokens are bytes, ``chat`` where the model comes without a tokenizer."""


def tokenizer_folder(config: Config) -> Path | None:
    """Return the model folder whose tokenizer ``data.source=chat`` uses; None: it is bytes, or no chat."""
    folder = config.model.from_hf if config.model.hf_tokenizer else None
    return Path(folder) if folder and config.data.source is DataSource.chat else None


def vocabulary_size(config: Config) -> int:
    """Return the number of tokens before Megatron pads it: the model's own, else the data source's."""
    if config.model.vocab_size:
        return config.model.vocab_size
    return BYTE_VOCABULARY if config.data.source in BYTE_SOURCES else MOCK_VOCABULARY


def uses_hf_tokenizer(config: Config) -> bool:
    """Tell whether Megatron is given the tokenizer of `model.from_hf`: byte tokens have none of their own."""
    prepared = config.data.source in (DataSource.indexed, DataSource.mock)
    return config.model.from_hf is not None and config.model.hf_tokenizer and prepared
