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
    """Return the model folder whose tokenizer ``data.source=chat`` uses; None: bytes."""
    # By name: the schema has these keys once a model can be taken from a folder.
    folder = getattr(config.model, "from_hf", None)
    wanted = folder is not None and getattr(config.model, "hf_tokenizer", True)
    return Path(str(folder)).expanduser().absolute() if wanted else None


def vocabulary_size(config: Config) -> int:
    """Return the number of tokens before Megatron pads it: the model's own, else the data source's."""
    if config.model.vocab_size:
        return config.model.vocab_size
    return BYTE_VOCABULARY if config.data.source in BYTE_SOURCES else MOCK_VOCABULARY
